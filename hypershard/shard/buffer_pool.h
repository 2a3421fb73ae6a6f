// Buffers of unsharded parameters, handed out and taken back: allocated once, then reused.
// Page faults cost as much as communication, so nothing is returned to the system during training.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/shard/counters.h"

namespace hypershard::shard {

/// Pool of byte buffers by size.
///
/// A buffer belongs to whoever acquired it until release(). Threads: one.
class BufferPool {
 public:
  BufferPool(Counters* counters, bool poison) : counters_(counters), poison_(poison) {}

  /// Returns a 1-D uint8 tensor of `bytes`, contents undefined (NaN bytes when poisoning).
  at::Tensor acquire(std::int64_t bytes, c10::Device device);
  void release(at::Tensor buffer);

 private:
  Counters* counters_;
  bool poison_;
  std::map<std::int64_t, std::vector<at::Tensor>> free_;
};

/// Rounds up so that what follows is aligned for every dtype and for vector loads.
constexpr std::int64_t align_bytes(std::int64_t bytes) {
  return (bytes + 63) / 64 * 64;
}

/// Wraps memory that `owner` keeps alive as a 1-D tensor with a version counter of its own, which a
/// view would share.
at::Tensor flat_tensor(
    void* data, std::int64_t numel, c10::ScalarType dtype, std::shared_ptr<void> owner
);

/// Reinterprets `numel` elements of `dtype` at a byte offset of a 1-D uint8 tensor. Memory: shares
/// it.
at::Tensor typed_view(
    const at::Tensor& bytes, std::int64_t offset_bytes, std::int64_t numel, c10::ScalarType dtype
);

}  // namespace hypershard::shard
