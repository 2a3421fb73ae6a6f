// Best fit among few buffers: an engine has a handful of unit sizes, so lists stay short.
#include "hypershard/comm/c10d/internal/staging_pool.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>

namespace hypershard::comm::internal {
namespace {

// Sizes are rounded up so that units of nearly equal size share buffers.
std::int64_t rounded(std::int64_t bytes) {
  constexpr std::int64_t kSmallest = 4096;
  std::int64_t step = kSmallest;
  while (step * 16 < bytes) {
    step *= 2;
  }
  return (bytes + step - 1) / step * step;
}

}  // namespace

StagingPool::Lease::Lease(std::shared_ptr<StagingPool> pool, at::Tensor buffer)
    : pool_(std::move(pool)), buffer_(std::move(buffer)) {}

StagingPool::Lease::Lease(Lease&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)), buffer_(std::move(other.buffer_)) {}

StagingPool::Lease& StagingPool::Lease::operator=(Lease&& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(buffer_, other.buffer_);
  return *this;
}

StagingPool::Lease::~Lease() {
  if (pool_ != nullptr) {
    pool_->take_back(std::move(buffer_));
  }
}

std::byte* StagingPool::Lease::data() const {
  return buffer_.defined() ? static_cast<std::byte*>(buffer_.data_ptr()) : nullptr;
}

StagingPool::Lease StagingPool::lend(std::int64_t bytes, c10::Device device) {
  if (bytes == 0) {
    return {};
  }
  const std::int64_t size = rounded(bytes);
  const std::lock_guard lock(mutex_);
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const bool fits = it->numel() >= size && it->numel() <= 2 * size && it->device() == device;
    if (fits && (best == free_.end() || it->numel() < best->numel())) {
      best = it;
    }
  }
  at::Tensor buffer;
  if (best != free_.end()) {
    buffer = std::move(*best);
    free_.erase(best);
    free_bytes_ -= buffer.numel();
  } else {
    buffer = at::empty({size}, at::TensorOptions().dtype(at::kByte).device(device));
    ++num_made_;
  }
  lent_bytes_ += buffer.numel();
  peak_lent_bytes_ = std::max(peak_lent_bytes_, lent_bytes_);
  return Lease(shared_from_this(), std::move(buffer));
}

void StagingPool::take_back(at::Tensor buffer) {
  const std::lock_guard lock(mutex_);
  lent_bytes_ -= buffer.numel();
  free_bytes_ += buffer.numel();
  free_.push_front(std::move(buffer));
  while (free_bytes_ + lent_bytes_ > 2 * peak_lent_bytes_) {
    free_bytes_ -= free_.back().numel();
    free_.pop_back();
  }
}

std::int64_t StagingPool::free_bytes() const {
  const std::lock_guard lock(mutex_);
  return free_bytes_;
}

std::int64_t StagingPool::num_made() const {
  const std::lock_guard lock(mutex_);
  return num_made_;
}

}  // namespace hypershard::comm::internal
