// See buffer_pool.h.
#include "hypershard/shard/buffer_pool.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "hypershard/core/huge_pages.h"

namespace hypershard::shard {

namespace {

// All bits set is a NaN in every floating dtype.
void poison(const at::Tensor& buffer) {
  if (buffer.numel() > 0) {
    std::memset(buffer.mutable_data_ptr(), 0xff, static_cast<std::size_t>(buffer.numel()));
  }
}

}  // namespace

at::Tensor BufferPool::acquire(std::int64_t bytes, c10::Device device) {
  counters_->live_unsharded_bytes += bytes;
  counters_->peak_unsharded_bytes =
      std::max(counters_->peak_unsharded_bytes, counters_->live_unsharded_bytes);
  std::vector<at::Tensor>& free = free_[bytes];
  at::Tensor buffer;
  if (free.empty()) {
    buffer = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
    if (device.is_cpu()) {
      advise_huge_pages(buffer.mutable_data_ptr(), bytes);  // it is kept for good
    }
    if (poison_) {
      poison(buffer);
    }
  } else {
    buffer = std::move(free.back());
    free.pop_back();
  }
  return buffer;
}

void BufferPool::release(at::Tensor buffer) {
  counters_->live_unsharded_bytes -= buffer.numel();
  if (poison_) {
    poison(buffer);
  }
  free_[buffer.numel()].push_back(std::move(buffer));
}

at::Tensor flat_tensor(
    void* data, std::int64_t numel, c10::ScalarType dtype, std::shared_ptr<void> owner
) {
  return at::from_blob(
      data, {numel}, [owner = std::move(owner)](void*) {}, at::TensorOptions().dtype(dtype)
  );
}

at::Tensor typed_view(
    const at::Tensor& bytes, std::int64_t offset_bytes, std::int64_t numel, c10::ScalarType dtype
) {
  const auto item = static_cast<std::int64_t>(c10::elementSize(dtype));
  return bytes.narrow(0, offset_bytes, numel * item).view(dtype);
}

}  // namespace hypershard::shard
