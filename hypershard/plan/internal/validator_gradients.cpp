// What validation checks of a backward: its collectives, and that every gradient ends where the
// plan says.
#include <algorithm>
#include <utility>

#include "hypershard/core/error.h"
#include "hypershard/plan/gradient_layouts.h"
#include "hypershard/plan/internal/gradient_faults.h"
#include "hypershard/plan/internal/validator.h"

namespace hypershard::plan::internal {

using layout::Layout;
using layout::Placement;

void Validator::end_root(c10::ArrayRef<at::Tensor> outputs) {
  in_root_ = false;
  std::vector<layout::TensorSpec> specs;
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad()) {
      continue;
    }
    specs.push_back(tracker_.spec_or_assume(output, "result of the model"));
    const auto has_gradient = std::make_shared<bool>(false);
    output.register_hook([has_gradient](const at::Tensor&) { *has_gradient = true; });
    outputs_.push_back({tracker_.value_of(output, "result of the model"), has_gradient});
  }
  const auto faults = seed_faults(tracker_, specs, plan_);
  if (!faults.empty()) {
    agreement_.fail(faults.front());
  }
  meet("end of forward");
}

void Validator::before_gradient(const ResolvedBoundary& boundary, const at::Tensor& gradient) {
  const std::string name = "the gradient at " + to_text(boundary.site);
  if (boundary.backward.has_value()) {
    compare(
        gradient,
        boundary.backward->arriving,
        name,
        "a boundary behind it does not reduce, or something in its forward differs between ranks"
    );
  }
  meet(name);
}

void Validator::before_reduction(
    const ResolvedParameter& parameter, const at::Tensor& /*gradient*/
) {
  meet("the reduction of the gradient of " + parameter.name);
}

void Validator::end_backward() {
  const TrackingPause pause;
  graph_task_ = -1;
  ++counts_.backwards;
  check_gradients();
  for (const auto& [parameter, tensor] : parameters_) {
    const at::Tensor& gradient = tensor.grad();
    if (parameter->is_trained && gradient.defined() && !options_.has_engine) {
      const Layout settled = layout::gradient_layout(parameter->spec.layout);
      compare(
          gradient,
          settled,
          "the gradient of parameter " + parameter->name,
          "it stays Partial: nobody reduces it; apply the plan with reduce_gradients, or reduce "
          "over ResolvedParameter::reduce_axes. If it is not Partial, remove a hook on it that "
          "does "
          "something else on each rank",
          /*include_data_axes=*/false
      );
    }
  }
  give_gradients_layouts();
  meet("end of backward");
}

// What is done with gradients between steps (zeroing, clipping) then meets tensors that are known.
void Validator::give_gradients_layouts() {
  for (const auto& [parameter, tensor] : parameters_) {
    const at::Tensor& gradient = tensor.grad();
    if (parameter->is_trained && gradient.defined() && !options_.has_engine) {
      const Layout settled = layout::gradient_layout(parameter->spec.layout);
      tracker_.set_spec(
          gradient, {parameter->spec.shape, settled}, "gradient of " + parameter->name
      );
    }
  }
}

void Validator::check_gradients() {
  std::vector<int> seeds;
  for (const RootOutput& output : outputs_) {
    if (*output.has_gradient) {
      seeds.push_back(output.value);
    }
  }
  if (seeds.empty()) {
    return;
  }
  const GradientLayouts gradients = derive_gradients(tracker_.tape(), seeds, mesh_);
  if (!gradients.conflicts.empty()) {
    agreement_.fail(conflict_fault(tracker_, tracker_.tape(), gradients.conflicts.front()));
  }
  check_boundary_gradients(gradients);
  check_parameter_gradients(gradients);
}

void Validator::check_boundary_gradients(const GradientLayouts& gradients) {
  for (const BoundaryGradient& found : gradients.boundaries) {
    const auto crossing = crossings_.find(found.op);
    if (crossing == crossings_.end()) {
      continue;
    }
    const ResolvedBoundary& boundary = plan_.boundaries[static_cast<std::size_t>(crossing->second)];
    if (boundary.backward.has_value() && are_alike(boundary.backward->arriving, found.arriving) &&
        are_alike(boundary.backward->leaving, found.leaving)) {
      continue;
    }
    agreement_.fail(
        {.module = module_text(boundary.site.module),
         .subject = "the gradient at " + to_text(boundary.site),
         .operands = {},
         .what = concat_text(
             "it arrives as {",
             layout::to_text(found.arriving, mesh_),
             "} and must leave as {",
             layout::to_text(found.leaving, mesh_),
             "}, but the boundary was resolved for ",
             boundary.backward.has_value()
                 ? concat_text(
                       "{",
                       layout::to_text(boundary.backward->arriving, mesh_),
                       "} and {",
                       layout::to_text(boundary.backward->leaving, mesh_),
                       "}"
                   )
                 : std::string("no gradient")
         ),
         .fix =
             "resolve the plan with the forward that is trained, and let the model take the same "
             "way in every forward"}
    );
  }
}

void Validator::check_parameter_gradients(const GradientLayouts& gradients) {
  for (const auto& [parameter, tensor] : parameters_) {
    if (!parameter->is_trained) {
      continue;
    }
    const int value = tracker_.value_of(tensor, parameter->name);
    const auto& found = gradients.of_value.size() > static_cast<std::size_t>(value)
                            ? gradients.of_value[static_cast<std::size_t>(value)]
                            : std::nullopt;
    if (!found.has_value()) {
      continue;  // not used in this forward
    }
    for (std::size_t axis = 0; axis < mesh_.axes().size(); ++axis) {
      const auto& [name, size] = mesh_.axes()[axis];
      const auto& reduced = parameter->reduce_axes;
      const bool is_reduced = std::find(reduced.begin(), reduced.end(), name) != reduced.end();
      const bool is_partial = found->placements[axis].kind == Placement::Kind::kPartial;
      if (size == 1 || is_data_axis(axis) || is_partial == is_reduced) {
        continue;
      }
      agreement_.fail(
          {.module = tracker_.module(),
           .subject = "the gradient of parameter " + parameter->name,
           .operands = {operand_text(parameter->spec, tensor.sizes().vec(), mesh_)},
           .what = concat_text(
               "it is ",
               found->placements[axis],
               " on axis '",
               name,
               is_partial ? "' and nothing reduces it there" : "' and is reduced there nevertheless"
           ),
           .fix = "resolve the plan again with the forward that is trained, so that reductions "
                  "follow its gradients"}
      );
    }
  }
}

}  // namespace hypershard::plan::internal
