// See NOTE [gradient law] in gradient_layouts.h.
#include "hypershard/plan/gradient_layouts.h"

#include <algorithm>

#include "hypershard/core/error.h"

namespace hypershard::plan {

using layout::Layout;
using layout::Placement;

namespace {

using Kind = Placement::Kind;

constexpr int kSeed = -1;  // the "use" of a value that the caller differentiates

class ReversePass {
 public:
  ReversePass(const Tape& tape, const layout::DeviceMesh& mesh)
      : tape_(tape), mesh_(mesh), num_axes_(static_cast<std::size_t>(mesh.num_axes())) {
    result_.of_value.resize(tape.values().size());
    first_use_.resize(tape.values().size());
  }

  GradientLayouts run(std::span<const int> seeds) {
    for (const int seed : seeds) {
      HS_ASSERT(
          seed >= 0 && static_cast<std::size_t>(seed) < tape_.values().size(),
          "plan: gradient seed ",
          seed,
          " is not on a tape of ",
          tape_.values().size(),
          " values"
      );
      add(seed, layout::gradient_layout(tape_.value(seed).spec.layout), kSeed);
    }
    for (auto op = static_cast<int>(tape_.ops().size()) - 1; op >= 0; --op) {
      step(op);
    }
    return std::move(result_);
  }

 private:
  void step(int index) {
    const TapeOperator& op = tape_.op(index);
    const bool reached = std::any_of(op.outputs.begin(), op.outputs.end(), [&](int output) {
      return result_.of_value[static_cast<std::size_t>(output)].has_value();
    });
    if (!reached) {
      return;
    }
    if (op.kind == TapeKind::kBoundary) {
      cross_boundary(index, op);
      return;
    }
    Layout of_replicate;  // by axis: what a Replicate operand's gradient is
    for (std::size_t axis = 0; axis < num_axes_; ++axis) {
      of_replicate.placements.push_back(replicate_gradient(op, axis));
    }
    for (const int operand : op.operands) {
      add(operand, operand_gradient(tape_.value(operand).spec.layout, of_replicate), index);
    }
  }

  void cross_boundary(int index, const TapeOperator& op) {
    const Layout& arrived = tape_.value(op.operands.at(0)).spec.layout;
    const Layout& arriving = *result_.of_value[static_cast<std::size_t>(op.outputs.at(0))];
    Layout leaving = layout::gradient_layout(arrived);
    for (std::size_t axis = 0; axis < num_axes_; ++axis) {
      const bool is_named = op.is_named.empty() || op.is_named[axis] != 0;
      if (!is_named && arrived.placements[axis].kind == Kind::kReplicate) {
        leaving.placements[axis] = arriving.placements[axis];
      }
    }
    result_.boundaries.push_back({index, arriving, leaving});
    add(op.operands[0], leaving, index);
  }

  Placement replicate_gradient(const TapeOperator& op, std::size_t axis) {
    if (!is_whole(op, axis)) {
      return Placement::partial();
    }
    std::optional<Placement> found;
    int found_output = op.outputs.front();
    for (const int output : op.outputs) {
      const auto& gradient = result_.of_value[static_cast<std::size_t>(output)];
      if (!gradient.has_value()) {
        continue;
      }
      const Placement& placement = gradient->placements[axis];
      if (found.has_value() && *found != placement && mesh_.axes()[axis].size > 1) {
        note_conflict(found_output, output, axis);
        return Placement::partial();
      }
      found = placement;
      found_output = output;
    }
    return *found;
  }

  Layout operand_gradient(const Layout& operand, const Layout& of_replicate) const {
    Layout gradient = layout::gradient_layout(operand);
    for (std::size_t axis = 0; axis < num_axes_; ++axis) {
      if (operand.placements[axis].kind == Kind::kReplicate) {
        gradient.placements[axis] = of_replicate.placements[axis];
      }
    }
    return gradient;
  }

  void add(int value, const Layout& gradient, int use) {
    if (!tape_.value(value).differentiable) {
      return;
    }
    auto& known = result_.of_value[static_cast<std::size_t>(value)];
    auto& uses = first_use_[static_cast<std::size_t>(value)];
    if (!known.has_value()) {
      known = gradient;
      uses.assign(num_axes_, use);
      return;
    }
    for (std::size_t axis = 0; axis < num_axes_; ++axis) {
      Placement& placement = known->placements[axis];
      if (placement == gradient.placements[axis] || mesh_.axes()[axis].size == 1) {
        continue;
      }
      const bool known_is_partial = placement.kind == Kind::kPartial;
      result_.conflicts.push_back(
          {value,
           static_cast<int>(axis),
           known_is_partial ? use : uses[axis],
           known_is_partial ? uses[axis] : use,
           origin_of(known_is_partial ? uses[axis] : use, axis)}
      );
      placement = Placement::partial();
      uses[axis] = known_is_partial ? uses[axis] : use;
    }
  }

  bool is_whole(const TapeOperator& op, std::size_t axis) const {
    return std::all_of(op.operands.begin(), op.operands.end(), [&](int operand) {
      return tape_.value(operand).spec.layout.placements[axis].kind == Kind::kReplicate;
    });
  }

  // Follows a Partial gradient back to where it arose.
  int origin_of(int use, std::size_t axis) const {
    while (use >= 0 && is_whole(tape_.op(use), axis)) {
      const TapeOperator& op = tape_.op(use);
      const auto partial = std::find_if(op.outputs.begin(), op.outputs.end(), [&](int output) {
        const auto& gradient = result_.of_value[static_cast<std::size_t>(output)];
        return gradient.has_value() && gradient->placements[axis].kind == Kind::kPartial;
      });
      if (partial == op.outputs.end()) {
        break;
      }
      use = first_use(*partial, axis);
    }
    return use;
  }

  int first_use(int value, std::size_t axis) const {
    const auto& uses = first_use_[static_cast<std::size_t>(value)];
    return uses.empty() ? kSeed : uses[axis];
  }

  // Two results of one operator: their gradients meet in its operands.
  void note_conflict(int one, int other, std::size_t axis) {
    const auto& gradient = result_.of_value[static_cast<std::size_t>(other)];
    const bool other_is_partial = gradient->placements[axis].kind == Kind::kPartial;
    const int replicate = other_is_partial ? one : other;
    const int partial = other_is_partial ? other : one;
    result_.conflicts.push_back(
        {one,
         static_cast<int>(axis),
         first_use(replicate, axis),
         first_use(partial, axis),
         origin_of(first_use(partial, axis), axis)}
    );
  }

  const Tape& tape_;
  const layout::DeviceMesh& mesh_;
  std::size_t num_axes_;
  GradientLayouts result_;
  std::vector<std::vector<int>> first_use_;  // by value and axis
};

}  // namespace

GradientLayouts derive_gradients(
    const Tape& tape, std::span<const int> seeds, const layout::DeviceMesh& mesh
) {
  return ReversePass(tape, mesh).run(seeds);
}

}  // namespace hypershard::plan
