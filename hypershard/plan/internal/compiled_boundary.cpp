// See compiled_boundary.h.
#include "hypershard/plan/internal/compiled_boundary.h"

#include <utility>

#include "hypershard/core/error.h"
#include "hypershard/layout/sharding.h"

namespace hypershard::plan::internal {

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
  std::vector<std::int64_t> global = global_shape(local);
  check_cuts(global);
  if (compiled_.size() >= kKept) {
    compiled_.pop_back();
  }
  return compiled_.insert(compiled_.begin() + 1, compile(local.vec(), std::move(global)))->run;
}

std::int64_t CompiledBoundary::num_pieces(const layout::Layout& layout, int dim) const {
  std::int64_t product = 1;
  for (const int axis : layout.cut_axes(dim)) {
    product *= mesh_->mesh().axes()[static_cast<std::size_t>(axis)].size;
  }
  return product;
}

std::vector<std::int64_t> CompiledBoundary::global_shape(at::IntArrayRef local) const {
  const std::vector<std::int64_t>& resolved = compiled_.front().local;
  std::vector<std::int64_t> global = local.vec();
  for (std::size_t dim = 0; dim < global.size(); ++dim) {
    const bool is_resolved = local.size() == resolved.size() && local[dim] == resolved[dim];
    global[dim] = is_resolved
                      ? boundary_.shape[dim]
                      : global[dim] * num_pieces(boundary_.forward.arriving, static_cast<int>(dim));
  }
  return global;
}

// See NOTE [sizes of other shapes].
void CompiledBoundary::check_cuts(const std::vector<std::int64_t>& global) const {
  for (std::size_t i = 0; i < global.size() && i < boundary_.shape.size(); ++i) {
    const auto dim = static_cast<int>(i);
    const std::int64_t pieces = num_pieces(boundary_.forward.leaving, dim);
    const std::int64_t resolved = boundary_.shape[i];
    const bool is_cut_here =
        boundary_.forward.arriving.cut_axes(dim) != boundary_.forward.leaving.cut_axes(dim);
    if (!is_cut_here || pieces == 1 || global[i] == resolved) {
      continue;
    }
    const std::int64_t piece = global[i] / pieces;
    const std::int64_t shortest = resolved / pieces;
    const bool looks_resolved =
        resolved % pieces != 0 && (piece == shortest || piece == shortest + 1);
    HS_SUPPORTED(
        global[i] % pieces == 0 && !looks_resolved,
        "plan: ",
        to_text(boundary_.site),
        ": dimension ",
        dim,
        " of a tensor of global shape ",
        global,
        " is to be cut into ",
        pieces,
        " pieces, but the plan was resolved for size ",
        resolved,
        looks_resolved ? " there, of which some rank's piece is as long: it could not tell the two"
                       : " there, and ranks can tell other sizes by even pieces only",
        HS_HINT(
            "give the model multiples of ",
            pieces,
            " there, resolve the plan for this shape, or leave the dimension whole: single "
            "positions, as in sampling, cannot be cut"
        )
    );
  }
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
