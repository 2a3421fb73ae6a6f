// Buffers for the pieces that wait to be summed, kept between collectives: fresh memory costs page
// faults that take as long as the transfer.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>

#include <ATen/core/Tensor.h>

namespace hypershard::comm::internal {

/// Lends byte buffers and keeps what comes back.
///
/// Bounded: what is kept and what is lent together stay below twice the most that was ever lent at
/// once; the buffer unused for longest goes first. Threads: any. The pool must be owned by
/// shared_ptr, since a lease holds on to it.
class StagingPool : public std::enable_shared_from_this<StagingPool> {
 public:
  /// A buffer on loan; goes back when destroyed.
  class Lease {
   public:
    Lease() = default;
    Lease(std::shared_ptr<StagingPool> pool, at::Tensor buffer);
    ~Lease();
    Lease(Lease&& other) noexcept;
    Lease& operator=(Lease&& other) noexcept;

    const at::Tensor& tensor() const { return buffer_; }  ///< uint8, at least as long as asked for
    std::byte* data() const;

   private:
    std::shared_ptr<StagingPool> pool_;
    at::Tensor buffer_;
  };

  /// Lends a buffer of at least `bytes`; none for 0 bytes.
  Lease lend(std::int64_t bytes, c10::Device device = c10::kCPU);

  /// Bytes in buffers that nobody has on loan.
  std::int64_t free_bytes() const;
  /// Buffers made since birth.
  std::int64_t num_made() const;

 private:
  void take_back(at::Tensor buffer);

  mutable std::mutex mutex_;
  std::list<at::Tensor> free_;  // most recently used first
  std::int64_t free_bytes_ = 0;
  std::int64_t lent_bytes_ = 0;
  std::int64_t peak_lent_bytes_ = 0;
  std::int64_t num_made_ = 0;
};

}  // namespace hypershard::comm::internal
