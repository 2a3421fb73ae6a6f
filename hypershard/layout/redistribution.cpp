// From the search's moves to steps, and their text forms.
// The search itself is in internal/redistribution_search.cpp.
#include "hypershard/layout/redistribution.h"

#include <cstddef>

#include "hypershard/core/error.h"
#include "hypershard/layout/internal/cut_state.h"
#include "hypershard/layout/internal/redistribution_search.h"
#include "hypershard/layout/sharding.h"

namespace hypershard::layout {
namespace {

internal::AxisSet set_of(const std::vector<int>& axes) {
  internal::AxisSet set = 0;
  for (const int axis : axes) {
    set |= internal::AxisSet{1} << axis;
  }
  return set;
}

std::vector<int> axes_of(internal::AxisSet set, int num_axes) {
  std::vector<int> axes;
  for (int axis = 0; axis < num_axes; ++axis) {
    if (internal::contains(set, axis)) {
      axes.push_back(axis);
    }
  }
  return axes;
}

/// Writes the placements of the step's axes, with the order of nested cuts where it is not the
/// mesh's.
std::string placements_text(
    const Layout& layout, const std::vector<int>& axes, const DeviceMesh& mesh
) {
  std::string text;
  for (const int axis : axes) {
    text += (text.empty() ? "" : ", ") + to_text(layout.placements[static_cast<std::size_t>(axis)]);
  }
  const std::string whole = to_text(layout, mesh);
  const std::size_t order = whole.find(" (dimension ");
  return order == std::string::npos ? text : text + whole.substr(order);
}

}  // namespace

std::string to_text(RedistributionStep::Kind kind) {
  using Kind = RedistributionStep::Kind;
  switch (kind) {
    case Kind::kSlice:
      return "slice";
    case Kind::kEmbed:
      return "embed";
    case Kind::kMask:
      return "mask";
    case Kind::kScale:
      return "scale";
    case Kind::kAllGather:
      return "all_gather";
    case Kind::kReduceScatter:
      return "reduce_scatter";
    case Kind::kAllReduce:
      return "all_reduce";
    case Kind::kAllToAll:
      return "all_to_all";
  }
  HS_FAIL(InternalError, "layout.redistribution: no step has number ", static_cast<int>(kind));
}

std::string to_text(const RedistributionStep& step, const DeviceMesh& mesh) {
  std::string names;
  for (const int axis : step.axes) {
    names += (names.empty() ? "" : "+") + mesh.axes()[static_cast<std::size_t>(axis)].name;
  }
  return to_text(step.kind) + (step.communicates() ? " over " : " along ") + names + " (" +
         placements_text(step.from, step.axes, mesh) + " -> " +
         placements_text(step.to, step.axes, mesh) + ")";
}

Traffic step_traffic(
    const RedistributionStep& step,
    std::span<const std::int64_t> shape,
    const DeviceMesh& mesh,
    int rank
) {
  const internal::CutSpace space(shape, mesh);
  return space.traffic(
      step.kind,
      set_of(step.axes),
      space.state_of(step.from),
      space.state_of(step.to),
      mesh.coordinates(rank)
  );
}

std::vector<RedistributionStep> plan_redistribution(
    std::span<const std::int64_t> shape,
    const Layout& from,
    const Layout& to,
    const DeviceMesh& mesh,
    const RedistributionOptions& options
) {
  check_spec({.shape = {shape.begin(), shape.end()}, .layout = from}, mesh);
  check_spec({.shape = {shape.begin(), shape.end()}, .layout = to}, mesh);
  HS_CHECK_GE(
      options.slow_weight, 1, "layout.redistribution: slow_weight must be at least 1: bytes cost"
  );
  const internal::CutSpace space(shape, mesh);
  std::vector<RedistributionStep> steps;
  internal::CutState state = space.state_of(from);
  for (const internal::CutMove& move :
       internal::cheapest_moves(space, mesh, state, space.state_of(to), options.slow_weight)) {
    if (!move.dropped) {
      steps.push_back(
          {.kind = move.kind,
           .axes = axes_of(move.axes, mesh.num_axes()),
           .reduce = move.reduce,
           .from = space.layout_of(state, to),
           .to = space.layout_of(move.to, to)}
      );
    }
    state = move.to;
  }
  return steps;
}

std::string to_text(
    std::span<const RedistributionStep> steps,
    std::span<const std::int64_t> shape,
    const DeviceMesh& mesh,
    int rank,
    std::int64_t element_bytes
) {
  std::string text;
  for (const RedistributionStep& step : steps) {
    text += (text.empty() ? "" : "\n") + to_text(step, mesh);
    if (step.communicates()) {
      const Traffic traffic = step_traffic(step, shape, mesh, rank);
      text += concat_text(
          ", sends ",
          traffic.sent * element_bytes,
          " bytes, receives ",
          traffic.received * element_bytes
      );
    }
  }
  return text.empty() ? "nothing to do" : text;
}

}  // namespace hypershard::layout
