// Conversions, ranges and the byte counts of one step. The counts are those of a direct exchange;
// rings and trees move the same bytes for even cuts.
#include "hypershard/layout/internal/cut_state.h"

#include <algorithm>
#include <cstddef>

#include "hypershard/core/error.h"
#include "hypershard/core/hash.h"
#include "hypershard/layout/sharding.h"

namespace hypershard::layout::internal {
namespace {

std::size_t at(int axis) {
  return static_cast<std::size_t>(axis);
}

int code_of(const Placement& placement) {
  switch (placement.kind) {
    case Placement::Kind::kShard:
      return placement.dim;
    case Placement::Kind::kPartial:
      return partial_code(placement.reduce);
    default:
      return kReplicated;
  }
}

Placement placement_of(int code) {
  if (code >= 0) {
    return Placement::shard(code);
  }
  return code == kReplicated ? Placement::replicate() : Placement::partial(reduce_of_code(code));
}

}  // namespace

std::size_t CutStateHash::operator()(const CutState& state) const {
  const std::uint64_t codes = hash_memory(state.code.data(), state.code.size());
  return hash_memory(state.level.data(), state.level.size(), codes);
}

CutSpace::CutSpace(std::span<const std::int64_t> shape, const DeviceMesh& mesh)
    : shape_(shape.begin(), shape.end()), num_axes_(mesh.num_axes()) {
  HS_SUPPORTED(
      num_axes_ <= kMaxAxes && shape.size() < 128,
      "layout.redistribution: ",
      mesh,
      " has ",
      num_axes_,
      " axes, or the tensor more than 127 dimensions: ",
      shape.size(),
      " (redistributions are planned on at most ",
      kMaxAxes,
      " axes)"
  );
  for (int axis = 0; axis < num_axes_; ++axis) {
    sizes_[at(axis)] = mesh.axes()[at(axis)].size;
  }
}

std::int64_t CutSpace::group_size(AxisSet axes) const {
  std::int64_t product = 1;
  for (int axis = 0; axis < num_axes_; ++axis) {
    product *= contains(axes, axis) ? size(axis) : 1;
  }
  return product;
}

CutState CutSpace::state_of(const Layout& layout) const {
  CutState state;
  state.code.fill(kReplicated);
  for (int axis = 0; axis < num_axes_; ++axis) {
    if (size(axis) > 1) {
      state.code[at(axis)] = static_cast<std::int8_t>(code_of(layout.placements[at(axis)]));
    }
  }
  for (int dim = 0; dim < static_cast<int>(shape_.size()); ++dim) {
    int level = 0;
    for (const int axis : layout.cut_axes(dim)) {
      if (size(axis) > 1) {
        state.level[at(axis)] = static_cast<std::int8_t>(level++);
      }
    }
  }
  return state;
}

Layout CutSpace::layout_of(const CutState& state, const Layout& unused) const {
  Layout layout;
  for (int axis = 0; axis < num_axes_; ++axis) {
    layout.placements.push_back(
        size(axis) > 1 ? placement_of(state.code[at(axis)]) : unused.placements[at(axis)]
    );
    layout.cut_order.push_back(axis);
  }
  std::stable_sort(layout.cut_order.begin(), layout.cut_order.end(), [&](int a, int b) {
    return state.level[at(a)] < state.level[at(b)];
  });
  // The order is stated only where it says something: most layouts have none.
  if (Layout mesh_order{layout.placements}; mesh_order == layout) {
    return mesh_order;
  }
  return layout;
}

int CutSpace::num_cuts(const CutState& state, int dim) const {
  int count = 0;
  for (int axis = 0; axis < num_axes_; ++axis) {
    count += state.code[at(axis)] == dim ? 1 : 0;
  }
  return count;
}

bool CutSpace::is_innermost(const CutState& state, AxisSet axes) const {
  for (int axis = 0; axis < num_axes_; ++axis) {
    const int dim = state.code[at(axis)];
    if (!contains(axes, axis) || dim < 0) {
      continue;
    }
    for (int other = 0; other < num_axes_; ++other) {
      if (!contains(axes, other) && state.code[at(other)] == dim &&
          state.level[at(other)] > state.level[at(axis)]) {
        return false;
      }
    }
  }
  return true;
}

Range CutSpace::range(const CutState& state, int dim, std::span<const int> coordinates) const {
  Range range{0, shape_[at(dim)]};
  const int cuts = num_cuts(state, dim);
  for (int level = 0; level < cuts; ++level) {
    for (int axis = 0; axis < num_axes_; ++axis) {
      if (state.code[at(axis)] == dim && state.level[at(axis)] == level) {
        range = nested_piece(range, size(axis), coordinates[at(axis)]);
        break;
      }
    }
  }
  return range;
}

std::int64_t CutSpace::numel(const CutState& state, std::span<const int> coordinates) const {
  std::int64_t product = 1;
  for (int dim = 0; dim < static_cast<int>(shape_.size()); ++dim) {
    product *= range(state, dim, coordinates).numel();
  }
  return product;
}

Traffic CutSpace::traffic(
    RedistributionStep::Kind kind,
    AxisSet axes,
    const CutState& from,
    const CutState& to,
    std::span<const int> coordinates
) const {
  using Kind = RedistributionStep::Kind;
  if (kind < Kind::kAllGather) {
    return {};
  }
  const std::int64_t group = group_size(axes);
  const std::int64_t before = numel(from, coordinates);
  if (kind == Kind::kAllReduce) {
    const std::int64_t moved = (2 * (group - 1) * before + group - 1) / group;
    return {.sent = moved, .received = moved};
  }
  const std::int64_t after = numel(to, coordinates);
  if (kind == Kind::kAllGather) {
    return {.sent = before * (group - 1), .received = after - before};
  }
  if (kind == Kind::kReduceScatter) {
    return {.sent = before - after, .received = after * (group - 1)};
  }
  // All-to-all: each element goes to every rank of the group that holds it afterwards.
  std::int64_t kept = 1;
  for (int dim = 0; dim < static_cast<int>(shape_.size()); ++dim) {
    kept *= intersect(range(from, dim, coordinates), range(to, dim, coordinates)).numel();
  }
  std::int64_t copies = 1;
  for (int axis = 0; axis < num_axes_; ++axis) {
    copies *= contains(axes, axis) && to.code[at(axis)] == kReplicated ? size(axis) : 1;
  }
  return {.sent = before * copies - kept, .received = after - kept};
}

}  // namespace hypershard::layout::internal
