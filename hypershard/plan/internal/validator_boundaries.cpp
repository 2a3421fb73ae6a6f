// What validation checks where the plan names a tensor.
#include <cstddef>
#include <utility>
#include <vector>

#include "hypershard/core/error.h"
#include "hypershard/plan/internal/validator.h"

namespace hypershard::plan::internal {

using layout::Layout;
using layout::Placement;
using layout::TensorSpec;

void Validator::check_identities(
    const std::string& path, RuleKind kind, c10::ArrayRef<at::Tensor> tensors
) {
  const auto found = identities_.find(path);
  if (found == identities_.end()) {
    return;
  }
  for (const ResolvedBoundary* boundary : found->second) {
    const auto index = static_cast<std::size_t>(boundary->site.index);
    if (boundary->site.kind != kind || index >= tensors.size() || !tensors[index].defined()) {
      continue;
    }
    const TensorSpec spec = tracker_.spec_or_assume(tensors[index], to_text(boundary->site));
    if (!are_alike(spec.layout, boundary->forward.arriving)) {
      agreement_.fail(fault_at(*boundary, tensors[index], spec));
    }
  }
}

LayoutFault Validator::fault_at(
    const ResolvedBoundary& boundary, const at::Tensor& tensor, const TensorSpec& spec
) const {
  return {
      .module = module_text(boundary.site.module),
      .subject = to_text(boundary.site),
      .operands = {operand_text(spec, tensor.sizes().vec(), mesh_)},
      .what = concat_text(
          "{",
          layout::to_text(spec.layout, mesh_),
          "} arrives, but the boundary was resolved for {",
          layout::to_text(boundary.forward.arriving, mesh_),
          "} and would do the wrong thing"
      ),
      .fix =
          "resolve the plan with inputs as the model gets them, and let the model take the same "
          "way in every forward"
  };
}

bool Validator::are_alike(Layout a, Layout b) const {
  for (Layout* each : {&a, &b}) {
    for (std::size_t axis = 0; axis < mesh_.axes().size(); ++axis) {
      if (mesh_.axes()[axis].size == 1) {
        each->placements[axis] = Placement::replicate();
        std::erase(each->cut_order, static_cast<int>(axis));
      }
    }
  }
  return a == b;
}

int Validator::number_of(const ResolvedBoundary& boundary) const {
  return static_cast<int>(&boundary - plan_.boundaries.data());
}

void Validator::before_boundary(const ResolvedBoundary& boundary, const at::Tensor& arriving) {
  const BoundarySite& site = boundary.site;
  if (in_backward()) {
    meet(to_text(site) + " (recomputed)");
    return;
  }
  ++counts_.boundaries;
  if (site.module.empty() && site.kind == RuleKind::kInput && !in_root_) {
    begin_root({});
    const auto index = static_cast<std::size_t>(site.index);
    if (tracker_.is_assumed(arriving) && plan_.inputs.at(index).has_value()) {
      set_layout(arriving, *plan_.inputs[index], to_text(site));
    }
  }
  const TensorSpec spec = tracker_.spec_or_assume(arriving, to_text(site));
  if (!are_alike(spec.layout, boundary.forward.arriving)) {
    agreement_.fail(fault_at(boundary, arriving, spec));
  }
  compare(arriving, spec.layout, "what arrives at " + to_text(site), kReplicateFix);
  meet(to_text(site));
}

void Validator::after_boundary(
    const ResolvedBoundary& boundary, const at::Tensor& arriving, const at::Tensor& result
) {
  if (in_backward()) {
    return;
  }
  const TensorSpec spec{
      tracker_.spec_or_assume(arriving, to_text(boundary.site)).shape, boundary.forward.leaving
  };
  TapeOperator op{.name = to_text(boundary.site)};
  op.boundary = number_of(boundary);
  for (const auto& placement : boundary.site.wanted) {
    op.is_named.push_back(placement.has_value() ? 1 : 0);
  }
  tracker_.record_boundary(arriving, result, spec, std::move(op));
  crossings_[static_cast<int>(tracker_.tape().ops().size()) - 1] = number_of(boundary);
  compare(
      result,
      spec.layout,
      "what leaves " + to_text(boundary.site),
      "the boundary's collectives gave these ranks different results: other hooks or another "
      "program on some rank"
  );
}

}  // namespace hypershard::plan::internal
