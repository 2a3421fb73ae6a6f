// See agreement.h.
#include "hypershard/shard/internal/agreement.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>

#include "hypershard/core/hash.h"

namespace hypershard::shard::internal {

at::Tensor order_signature(const std::vector<int>& order) {
  at::Tensor signature = at::zeros({2}, at::TensorOptions().dtype(at::kLong));
  auto* data = signature.mutable_data_ptr<std::int64_t>();
  data[0] = static_cast<std::int64_t>(order.size());
  data[1] = static_cast<std::int64_t>(hash_memory(order.data(), order.size() * sizeof(int)));
  return signature;
}

at::Tensor gather_rows(comm::Communicator& communicator, const at::Tensor& mine) {
  // A communicator of planned ranks moves nothing: there all agree.
  const at::Tensor all =
      mine.view({1, -1}).expand({communicator.size(), mine.numel()}).contiguous();
  communicator.all_gather(all.view({-1}), mine, {}, "agreement")->wait_released();
  return all;
}

bool equal_on_all_ranks(comm::Communicator& communicator, const at::Tensor& mine) {
  if (communicator.size() == 1) {
    return true;
  }
  const at::Tensor all = gather_rows(communicator, mine);
  return at::equal(all, mine.view({1, -1}).expand_as(all));
}

}  // namespace hypershard::shard::internal
