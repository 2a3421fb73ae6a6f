// See gradient_faults.h.
#include "hypershard/plan/internal/gradient_faults.h"

#include "hypershard/core/text.h"
#include "hypershard/layout/sharding.h"
#include "hypershard/plan/internal/module_name.h"

namespace hypershard::plan::internal {

using layout::Placement;

namespace {

std::string use_text(const LayoutTracker& tracker, const Tape& tape, int op) {
  if (op < 0) {
    return "the result of the forward";
  }
  const TapeOperator& use = tape.op(op);
  const std::string& module = tracker.module_path(use.module);
  if (names_module(use.name, module)) {
    return use.name;
  }
  return use.name + " in " + module;
}

std::string value_text(const LayoutTracker& tracker, const Tape& tape, int index) {
  const TapeValue& value = tape.value(index);
  if (value.producer >= 0) {
    return "the result of " + use_text(tracker, tape, value.producer);
  }
  return value.name.empty() ? "a tensor from outside" : "'" + value.name + "'";
}

}  // namespace

LayoutFault conflict_fault(
    const LayoutTracker& tracker, const Tape& tape, const GradientConflict& conflict
) {
  const std::string& axis = tracker.mesh().axes()[static_cast<std::size_t>(conflict.axis)].name;
  const TapeValue& value = tape.value(conflict.value);
  const int at = conflict.partial_origin >= 0 ? conflict.partial_origin : conflict.replicate_use;
  const std::string& module = at >= 0 ? tracker.module_path(tape.op(at).module) : "(root)";
  std::string partial = use_text(tracker, tape, conflict.partial_origin);
  if (conflict.partial_use != conflict.partial_origin) {
    partial += " (through " + use_text(tracker, tape, conflict.partial_use) + ")";
  }
  return {
      .module = module,
      .subject = "the gradient of " + value_text(tracker, tape, conflict.value),
      .operands = {operand_text(
          value.spec,
          layout::local_shape(value.spec, tracker.mesh(), tracker.rank()),
          tracker.mesh()
      )},
      .what = concat_text(
          "on axis '",
          axis,
          "' it is Partial from ",
          partial,
          " and Replicate from ",
          use_text(tracker, tape, conflict.replicate_use),
          "; the two cannot be summed"
      ),
      .fix = concat_text(
          "a boundary is missing: state an input of ",
          module,
          " (or of a module around it) as {",
          axis,
          " = \"replicate\"}, which reduces the gradient in backward"
      )
  };
}

std::vector<LayoutFault> seed_faults(
    const LayoutTracker& tracker,
    const std::vector<layout::TensorSpec>& outputs,
    const ResolvedPlan& plan
) {
  std::vector<LayoutFault> faults;
  const auto& axes = tracker.mesh().axes();
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    for (std::size_t axis = 0; axis < axes.size(); ++axis) {
      const Placement& placement = outputs[i].layout.placements[axis];
      const bool is_sum = placement.reduce == Placement::Reduce::kSum;
      const bool is_mean = placement.reduce == Placement::Reduce::kAvg;
      const bool is_data = plan.is_data_axis(axes[axis].name);
      if (axes[axis].size == 1 || placement.kind != Placement::Kind::kPartial || is_sum ||
          (is_data && is_mean)) {
        continue;
      }
      faults.push_back(
          {.module = "(root)",
           .subject = concat_text("result ", i, " of the forward"),
           .operands = {},
           .what = concat_text(
               "it is ",
               placement,
               " on axis '",
               axes[axis].name,
               is_mean ? concat_text(
                             "', so a backward from it would take each rank's term for the whole "
                             "and give gradients ",
                             axes[axis].size,
                             " times too large"
                         )
                       : std::string("', so only the rank that holds it has a gradient, but a "
                                     "backward on each rank would give all of them one")
           ),
           .fix = is_data ? std::string("differentiate a sum or a mean over the data axes")
                          : concat_text(
                                "state the output that it comes from as {",
                                axes[axis].name,
                                " = \"replicate\"}, or name the axis among the data axes"
                            )}
      );
    }
  }
  return faults;
}

}  // namespace hypershard::plan::internal
