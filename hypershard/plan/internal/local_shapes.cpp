// See local_shapes.h.
#include "hypershard/plan/internal/local_shapes.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include "hypershard/layout/sharding.h"

namespace hypershard::plan::internal {

LocalShapes::LocalShapes(
    const std::vector<MatchedParameter>& parameters, const layout::DeviceMesh& mesh, int rank
) {
  const at::NoGradGuard no_grad;
  for (const MatchedParameter& parameter : parameters) {
    const auto local = layout::local_shape(parameter.spec, mesh, rank);
    if (parameter.tensor.sizes() != at::IntArrayRef(local)) {
      at::Tensor handle = parameter.tensor;
      changed_.emplace_back(handle, handle.variable_data());
      handle.set_data(at::zeros(local, handle.options().requires_grad(false)));
    }
    parts_.add(parameter.tensor, parameter.spec, mesh, rank, /*ranks=*/nullptr);
  }
}

LocalShapes::~LocalShapes() {
  for (auto& [handle, held] : changed_) {
    handle.set_data(held);
  }
}

}  // namespace hypershard::plan::internal
