// Runs a small model plain and under a plan on several ranks, for the tests of production and
// validation.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hypershard/comm/world.h"
#include "hypershard/layout/sharding.h"
#include "hypershard/plan/apply.h"
#include "hypershard/plan/test_models.h"
#include "hypershard/testing/run_ranks.h"

namespace hypershard::plan::test {

inline std::shared_ptr<const comm::ProcessMesh> make_mesh(
    std::shared_ptr<comm::World> world, std::vector<layout::MeshAxis> axes
) {
  layout::DeviceMesh mesh(std::move(axes), world->topology());
  return std::make_shared<const comm::ProcessMesh>(std::move(world), std::move(mesh));
}

/// The same values on all ranks.
inline at::Tensor formula_tensor(at::IntArrayRef sizes, double phase) {
  std::int64_t count = 1;
  for (const auto size : sizes) {
    count *= size;
  }
  return at::arange(count, at::kDouble).mul(0.37).add(phase).cos().view(sizes);
}

/// This rank's part of a tensor that it holds whole.
inline at::Tensor part_of(
    const at::Tensor& whole, const layout::Layout& layout, const comm::ProcessMesh& mesh
) {
  const layout::TensorSpec spec{whole.sizes().vec(), layout};
  const auto shape = layout::local_shape(spec, mesh.mesh(), mesh.rank());
  const auto offset = layout::local_offset(spec, mesh.mesh(), mesh.rank());
  at::Tensor part = whole;
  for (std::size_t dim = 0; dim < shape.size(); ++dim) {
    part = part.narrow(static_cast<std::int64_t>(dim), offset[dim], shape[dim]);
  }
  return part.contiguous();
}

/// Gradients by first name; undefined ones are left out.
inline std::map<std::string, at::Tensor> gradients_of(torch::nn::Module& model) {
  std::map<std::string, at::Tensor> gradients;
  for (const auto& item : model.named_parameters()) {
    if (item.value().grad().defined()) {
      gradients[item.key()] = item.value().grad().clone();
    }
  }
  return gradients;
}

/// The largest deviation of any parameter's full gradient; infinite if one is missing or not
/// finite.
inline double worst_gradient(
    const AppliedPlan& applied, const std::map<std::string, at::Tensor>& expected, double scale = 1
) {
  double worst = 0;
  for (const auto& [name, gradient] : expected) {
    const at::Tensor found = applied.full_parameter(name, /*gradient=*/true);
    if (!found.defined()) {
      return std::numeric_limits<double>::infinity();
    }
    // A NaN would pass as no larger than the largest so far.
    const double difference = (found * scale - gradient).abs().max().item<double>();
    worst = std::isfinite(difference) ? std::max(worst, difference)
                                      : std::numeric_limits<double>::infinity();
  }
  return worst;
}

}  // namespace hypershard::plan::test
