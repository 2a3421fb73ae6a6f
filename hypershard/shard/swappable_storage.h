// A storage whose memory can be taken away and put back under the tensors that view it.
// That is how a parameter's handles, and what autograd saved, live through reshard and unshard.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

namespace hypershard::shard {

/// Memory of fixed size under many tensor views, attached or not.
///
/// Detached, any access to a view's data throws `message`. Does not own the memory: the owner keeps
/// it alive while attached. Threads: one at a time.
class SwappableStorage {
 public:
  /// Starts detached.
  SwappableStorage(std::int64_t bytes, c10::Device device, std::string message);

  /// Puts memory of at least the stated size under all views.
  void attach(void* data);
  /// Takes the memory away; accesses throw from now on.
  void detach();
  bool attached() const { return attached_; }

  /// Makes a contiguous view. Units: `offset` in elements of `dtype`.
  at::Tensor view(std::int64_t offset, at::IntArrayRef shape, c10::ScalarType dtype) const;

 private:
  c10::Storage storage_;
  c10::Device device_;
  std::string message_;
  bool attached_ = false;
};

/// Makes a tensor whose data may not be touched: any access throws `message`. Shape and dtype as
/// given.
at::Tensor make_tombstone(at::IntArrayRef shape, c10::ScalarType dtype, const std::string& message);

}  // namespace hypershard::shard
