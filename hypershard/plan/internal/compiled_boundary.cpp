// See compiled_boundary.h.
#include "hypershard/plan/internal/compiled_boundary.h"

#include <utility>

#include "hypershard/layout/sharding.h"

namespace hypershard::plan::internal {

using layout::Placement;

CompiledBoundary::CompiledBoundary(
    const ResolvedBoundary& boundary, std::shared_ptr<const comm::ProcessMesh> mesh
)
    : boundary_(boundary), mesh_(std::move(mesh)) {
  auto local = layout::local_shape(
      {boundary.shape, boundary.forward.arriving}, mesh_->mesh(), mesh_->rank()
  );
  compiled_.push_back(compile(std::move(local), boundary.shape));
}

CompiledBoundary::Compiled CompiledBoundary::compile(
    std::vector<std::int64_t> local, std::vector<std::int64_t> global
) const {
  dtensor::GradientLayouts gradients;
  if (boundary_.backward.has_value()) {
    gradients.output = boundary_.backward->arriving;
    gradients.input = boundary_.backward->leaving;
  }
  return {
      std::move(local),
      dtensor::Redistribution(
          {std::move(global), boundary_.forward.arriving},
          boundary_.forward.leaving,
          mesh_,
          gradients,
          to_text(boundary_.site)
      )
  };
}

const dtensor::Redistribution& CompiledBoundary::for_shape(at::IntArrayRef local) {
  for (const Compiled& each : compiled_) {
    if (local == at::IntArrayRef(each.local)) {
      return each.run;
    }
  }
  std::vector<std::int64_t> global = local.vec();
  const auto& placements = boundary_.forward.arriving.placements;
  for (std::size_t axis = 0; axis < placements.size(); ++axis) {
    if (placements[axis].kind == Placement::Kind::kShard) {
      global.at(static_cast<std::size_t>(placements[axis].dim)) *= mesh_->mesh().axes()[axis].size;
    }
  }
  if (compiled_.size() >= kKept) {
    compiled_.pop_back();
  }
  return compiled_.insert(compiled_.begin() + 1, compile(local.vec(), std::move(global)))->run;
}

at::Tensor CompiledBoundary::cross(at::Tensor arriving) {
  const dtensor::Redistribution& run = for_shape(arriving.sizes());
  return run(std::move(arriving));
}

}  // namespace hypershard::plan::internal
