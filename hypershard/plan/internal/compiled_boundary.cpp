// See compiled_boundary.h.
#include "hypershard/plan/internal/compiled_boundary.h"

#include <algorithm>
#include <utility>

#include "hypershard/core/error.h"
#include "hypershard/layout/sharding.h"

namespace hypershard::plan::internal {

CompiledBoundary::CompiledBoundary(
    const ResolvedBoundary& boundary, std::shared_ptr<const comm::ProcessMesh> mesh
)
    : boundary_(boundary),
      mesh_(std::move(mesh)),
      coordinates_(mesh_->mesh().coordinates(mesh_->rank())),
      origins_(boundary.shape.size()) {
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

void CompiledBoundary::set_origin(
    std::size_t dim, const CompiledBoundary* boundary, std::size_t dim_there
) {
  origins_.at(dim) = {boundary, dim_there};
}

std::int64_t CompiledBoundary::piece_of(
    const layout::Layout& layout, std::size_t dim, std::int64_t global
) const {
  const layout::DeviceMesh& mesh = mesh_->mesh();
  layout::Range range{0, global};
  for (const int axis : layout.cut_axes(static_cast<int>(dim))) {
    const auto i = static_cast<std::size_t>(axis);
    range = layout::nested_piece(range, mesh.axes()[i].size, coordinates_[i]);
  }
  return range.numel();
}

// Equal on all ranks: whether any of them would get less than the whole.
void CompiledBoundary::check_whole(const WholeDimensionScope& scope) const {
  const auto dim = static_cast<std::size_t>(scope.dim());
  if (dim >= global_.size()) {
    return;
  }
  const layout::Layout& leaving = boundary_.forward.leaving;
  const std::vector<int> axes = leaving.cut_axes(scope.dim());
  const bool is_cut = std::any_of(axes.begin(), axes.end(), [this](int axis) {
    return mesh_->mesh().axes()[static_cast<std::size_t>(axis)].size > 1;
  });
  HS_SUPPORTED(
      !is_cut,
      "plan: ",
      boundary_.site,
      ": of dimension ",
      dim,
      " this rank would get ",
      piece_of(leaving, dim, global_[dim]),
      " of ",
      global_[dim],
      " under {",
      layout::to_text(leaving, mesh_->mesh()),
      "} (global shape ",
      global_,
      "), but ",
      scope.needed_by(),
      " needs all ",
      global_[dim],
      " on every rank",
      HS_HINT(scope.hint())
  );
}

// See NOTE [sizes of cuts].
std::int64_t CompiledBoundary::global_size(std::size_t dim, std::int64_t local) const {
  const Origin& origin = origins_[dim];
  if (origin.boundary != nullptr && origin.dim < origin.boundary->global_.size()) {
    const std::int64_t known = origin.boundary->global_[origin.dim];
    if (piece_of(boundary_.forward.arriving, dim, known) == local) {
      return known;
    }
  }
  if (local == compiled_.front().local[dim]) {
    return boundary_.shape[dim];
  }
  std::int64_t global = local;
  for (const int axis : boundary_.forward.arriving.cut_axes(static_cast<int>(dim))) {
    global *= mesh_->mesh().axes()[static_cast<std::size_t>(axis)].size;
  }
  return global;
}

const dtensor::Redistribution& CompiledBoundary::for_shape(at::IntArrayRef local) {
  HS_CHECK(
      local.size() == boundary_.shape.size(),
      "plan: ",
      boundary_.site,
      ": a tensor of ",
      local.size(),
      " dimensions arrives, but the plan was resolved for ",
      boundary_.shape.size(),
      " (global shape ",
      boundary_.shape,
      ")",
      HS_HINT(
          "sizes may change after resolving, dimensions may not: resolve the plan with inputs as "
          "the model gets them"
      )
  );
  global_.resize(local.size());
  for (std::size_t dim = 0; dim < local.size(); ++dim) {
    global_[dim] = global_size(dim, local[dim]);
  }
  if (const WholeDimensionScope* scope = WholeDimensionScope::current()) [[unlikely]] {
    check_whole(*scope);
  }
  for (const Compiled& each : compiled_) {
    if (local == at::IntArrayRef(each.local) && each.run.source().shape == global_) {
      return each.run;
    }
  }
  if (compiled_.size() >= kKept) {
    compiled_.pop_back();
  }
  return compiled_.insert(compiled_.begin() + 1, compile(local.vec(), global_))->run;
}

at::Tensor CompiledBoundary::cross(at::Tensor arriving) {
  const dtensor::Redistribution& run = for_shape(arriving.sizes());
  at::Tensor result = run(std::move(arriving));
  if (!boundary_.backward.has_value() && result.requires_grad()) [[unlikely]] {
    // Results whose gradients nobody asks for are no mistake, so only a gradient that comes is one.
    result.register_hook([site = to_text(boundary_.site)](const at::Tensor&) {
      HS_FAIL(
          InvalidArgument,
          "plan: a gradient arrives at ",
          site,
          ", where none crossed when the plan was resolved, so nobody knows how it lies",
          HS_HINT("resolve the plan with the parameters and the forward that are trained")
      );
    });
  }
  return result;
}

}  // namespace hypershard::plan::internal
