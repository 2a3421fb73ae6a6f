// See global_shape.h.
#include "hypershard/plan/internal/global_shape.h"

#include <algorithm>
#include <numeric>
#include <string>

#include <ATen/ops/empty.h>

#include "hypershard/comm/communicator.h"

namespace hypershard::plan::internal {

std::shared_ptr<comm::Communicator> validation_ranks(const comm::ProcessMesh& mesh) {
  std::vector<int> ranks(static_cast<std::size_t>(mesh.mesh().size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return mesh.world().communicator("validation", ranks);
}

std::vector<std::int64_t> global_shape(
    at::IntArrayRef local,
    const layout::Layout& layout,
    const comm::ProcessMesh& mesh,
    comm::Communicator& everyone
) {
  const auto dims = static_cast<std::int64_t>(local.size());
  const auto options = at::TensorOptions().dtype(at::kLong);
  at::Tensor mine = at::empty({dims}, options);
  std::copy(local.begin(), local.end(), mine.mutable_data_ptr<std::int64_t>());
  at::Tensor all = mine.view({1, dims}).expand({everyone.size(), dims}).contiguous();
  if (everyone.size() > 1 && dims > 0) {
    everyone.all_gather(all.view({-1}), mine, {}, "validation")->wait_released();
  }
  const auto sizes = all.accessor<std::int64_t, 2>();
  std::vector<std::int64_t> global = local.vec();
  for (std::int64_t dim = 0; dim < dims; ++dim) {
    std::vector<std::string> axes;
    for (const int axis : layout.cut_axes(static_cast<int>(dim))) {
      axes.push_back(mesh.mesh().axes()[static_cast<std::size_t>(axis)].name);
    }
    if (axes.empty()) {
      continue;
    }
    std::int64_t sum = 0;
    for (const int rank : mesh.mesh().group(axes, mesh.rank())) {
      sum += sizes[rank][dim];
    }
    global[static_cast<std::size_t>(dim)] = sum;
  }
  return global;
}

}  // namespace hypershard::plan::internal
