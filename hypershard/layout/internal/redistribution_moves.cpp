// Which steps may follow a layout. NOTE [innermost cuts]: an axis can be gathered, cut or exchanged
// only inside all cuts of the same dimension by axes outside the group, since those ranks hold
// nothing of each other's pieces; all ranks of a group then share the region they rearrange.
#include <algorithm>
#include <cstddef>
#include <numeric>

#include "hypershard/layout/internal/redistribution_search.h"

namespace hypershard::layout::internal {
namespace {

using Kind = RedistributionStep::Kind;
using Reduce = Placement::Reduce;

std::size_t at(int axis) {
  return static_cast<std::size_t>(axis);
}

AxisSet only(int axis) {
  return AxisSet{1} << axis;
}

/// Tells whether the order in which two axes are reduced does not matter.
bool commute(int a, int b) {
  const auto is_linear = [](int code) {
    return code == partial_code(Reduce::kSum) || code == partial_code(Reduce::kAvg);
  };
  return a == b || (is_linear(a) && is_linear(b));
}

}  // namespace

CutMoves::CutMoves(
    const CutSpace& space, const DeviceMesh& mesh, const CutState& from, const CutState& to
)
    : space_(space), target_(to) {
  bool reduces = false;
  for (int axis = 0; axis < space.num_axes(); ++axis) {
    reduces |= is_partial_code(from.code[at(axis)]) && from.code[at(axis)] != to.code[at(axis)];
  }
  const AxisSet acting = acting_axes(from);
  // Where a slow link must be crossed, axes that stay as they are may share the load.
  const bool is_slow = crosses_supernodes(mesh, acting);
  for (int axis = 0; axis < space.num_axes(); ++axis) {
    const bool may_help = is_slow && !is_partial_code(from.code[at(axis)]);
    if (space.size(axis) > 1 && (contains(acting, axis) || may_help)) {
      axes_.push_back(axis);
    }
  }
  // A slow gather needs a dimension that no other axis cuts, so two to choose from.
  choose_dims(from, is_slow ? 2 : reduces ? 1 : 0);
  for (AxisSet set = 1; set < (AxisSet{1} << space.num_axes()); ++set) {
    bool acts = true;
    for (int axis = 0; axis < space.num_axes(); ++axis) {
      acts &= !contains(set, axis) || std::count(axes_.begin(), axes_.end(), axis) == 1;
    }
    if (acts) {
      groups_.push_back(set);
    }
  }
}

AxisSet CutMoves::acting_axes(const CutState& from) const {
  AxisSet acting = 0;
  for (int axis = 0; axis < space_.num_axes(); ++axis) {
    const bool changes = from.code[at(axis)] != target_.code[at(axis)] ||
                         from.level[at(axis)] != target_.level[at(axis)];
    acting |= changes ? only(axis) : 0;
  }
  for (AxisSet before = 0; before != acting;) {
    before = acting;
    for (int axis = 0; axis < space_.num_axes(); ++axis) {
      acting |= is_in_the_way(from, axis, before) ? only(axis) : 0;
    }
  }
  return acting;
}

bool CutMoves::is_in_the_way(const CutState& from, int axis, AxisSet acting) const {
  const int code = from.code[at(axis)];
  for (int other = 0; other < space_.num_axes(); ++other) {
    const int before = from.code[at(other)];
    const bool shares_dim = code >= 0 && (before == code || target_.code[at(other)] == code);
    const bool blocks = is_partial_code(code) && is_partial_code(before) && !commute(code, before);
    if (contains(acting, other) && (shares_dim || blocks)) {
      return true;
    }
  }
  return false;
}

void CutMoves::choose_dims(const CutState& from, std::size_t num_extra) {
  const auto& shape = space_.shape();
  std::int64_t pieces = 1;
  for (int axis = 0; axis < space_.num_axes(); ++axis) {
    pieces *= space_.size(axis);
    for (const int dim : {int{from.code[at(axis)]}, int{target_.code[at(axis)]}}) {
      if (dim >= 0) {
        dims_.push_back(dim);
      }
    }
  }
  // First those that all ranks can cut evenly, then the longest.
  std::vector<int> candidates(shape.size());
  std::iota(candidates.begin(), candidates.end(), 0);
  std::stable_sort(candidates.begin(), candidates.end(), [&](int a, int b) {
    const auto is_even = [&](int dim) {
      return shape[at(dim)] > 0 && shape[at(dim)] % pieces == 0;
    };
    return is_even(a) != is_even(b) ? is_even(a) : !is_even(a) && shape[at(a)] > shape[at(b)];
  });
  candidates.resize(std::min(candidates.size(), num_extra));
  dims_.insert(dims_.end(), candidates.begin(), candidates.end());
  std::sort(dims_.begin(), dims_.end());
  dims_.erase(std::unique(dims_.begin(), dims_.end()), dims_.end());
}

void CutMoves::for_each(const CutState& state, const Visit& visit) const {
  for (const int axis : axes_) {
    local_moves(state, axis, visit);
    partial_moves(state, axis, visit);
  }
  for (const AxisSet axes : groups_) {
    gathers_and_exchanges(state, axes, visit);
    reductions(state, axes, visit);
  }
}

CutState CutMoves::moved(const CutState& state, AxisSet axes, int dim) const {
  CutState result = state;
  std::vector<int> placed;
  for (int axis = 0; axis < space_.num_axes(); ++axis) {
    if (contains(axes, axis)) {
      result.code[at(axis)] = kReplicated;
      result.level[at(axis)] = 0;
      placed.push_back(axis);
    }
  }
  if (dim < 0) {
    std::stable_sort(placed.begin(), placed.end(), [&](int a, int b) {
      return target_.level[at(a)] < target_.level[at(b)];
    });
  }
  for (const int axis : placed) {
    const int code = dim < 0 ? target_.code[at(axis)] : dim;
    if (code >= 0) {
      result.level[at(axis)] = static_cast<std::int8_t>(space_.num_cuts(result, code));
    }
    result.code[at(axis)] = static_cast<std::int8_t>(code);
  }
  return result;
}

void CutMoves::local_moves(const CutState& state, int axis, const Visit& visit) const {
  const int code = state.code[at(axis)];
  const int wanted = target_.code[at(axis)];
  if (code == kReplicated) {
    for (const int dim : dims_) {
      visit({.kind = Kind::kSlice, .axes = only(axis), .to = moved(state, only(axis), dim)});
    }
  }
  // Shard -> Partial moves nothing: zeros stand where other ranks have their parts. Averages follow
  // from sums.
  const bool embeds =
      code >= 0 && is_partial_code(wanted) && space_.is_innermost(state, only(axis));
  if (embeds) {
    const int reduced = wanted == partial_code(Reduce::kAvg) ? partial_code(Reduce::kSum) : wanted;
    CutMove move{.kind = Kind::kEmbed, .axes = only(axis), .reduce = reduce_of_code(reduced)};
    move.to = state;
    move.to.code[at(axis)] = static_cast<std::int8_t>(reduced);
    move.to.level[at(axis)] = 0;
    visit(move);
  }
}

void CutMoves::partial_moves(const CutState& state, int axis, const Visit& visit) const {
  const int code = state.code[at(axis)];
  const int wanted = target_.code[at(axis)];
  const int sum = partial_code(Reduce::kSum);
  const int avg = partial_code(Reduce::kAvg);
  CutMove move{.axes = only(axis), .to = state};
  const auto go = [&](Kind kind, int to, bool dropped) {
    move.kind = kind;
    move.to.code[at(axis)] = static_cast<std::int8_t>(to);
    move.reduce = reduce_of_code(to);
    move.dropped = dropped;
    visit(move);
  };
  if (code == kReplicated && is_partial_code(wanted)) {
    // The average, maximum or minimum of equal values is that value: nothing to do.
    go(Kind::kMask, wanted, /*dropped=*/wanted != sum);
  }
  if ((code == avg && wanted != avg) || (code == sum && wanted == avg)) {
    go(Kind::kScale, code == avg ? sum : avg, /*dropped=*/false);
  }
}

void CutMoves::gathers_and_exchanges(const CutState& state, AxisSet axes, const Visit& visit)
    const {
  bool to_target = true;
  bool gathers = true;
  const bool single = (axes & (axes - 1)) == 0;
  int current = kReplicated;
  for (const int axis : axes_) {
    if (!contains(axes, axis)) {
      continue;
    }
    current = state.code[at(axis)];
    if (current < 0) {
      return;
    }
    to_target &= !is_partial_code(target_.code[at(axis)]);
    gathers &= target_.code[at(axis)] == kReplicated;
  }
  if (!space_.is_innermost(state, axes)) {
    return;
  }
  CutMove gather{.kind = Kind::kAllGather, .axes = axes, .to = state};
  for (const int axis : axes_) {
    if (contains(axes, axis)) {
      gather.to.code[at(axis)] = kReplicated;
      gather.to.level[at(axis)] = 0;
    }
  }
  visit(gather);
  for (std::size_t i = 0; single && i < dims_.size(); ++i) {
    if (dims_[i] != current) {
      visit({.kind = Kind::kAllToAll, .axes = axes, .to = moved(state, axes, dims_[i])});
    }
  }
  if (!single && to_target && !gathers) {
    visit({.kind = Kind::kAllToAll, .axes = axes, .to = moved(state, axes, -1)});
  }
}

bool CutMoves::may_reduce(const CutState& state, AxisSet axes) const {
  int code = kReplicated;
  for (int axis = space_.num_axes() - 1; axis >= 0; --axis) {
    if (contains(axes, axis)) {
      const int own = state.code[at(axis)];
      if (!is_partial_code(own) || (code != kReplicated && own != code)) {
        return false;
      }
      code = own;
      // Later axes are reduced first unless the order does not matter.
      for (int later = axis + 1; later < space_.num_axes(); ++later) {
        const int pending = state.code[at(later)];
        if (!contains(axes, later) && is_partial_code(pending) && !commute(own, pending)) {
          return false;
        }
      }
    }
  }
  return true;
}

void CutMoves::reductions(const CutState& state, AxisSet axes, const Visit& visit) const {
  if (!may_reduce(state, axes)) {
    return;
  }
  CutMove move{.kind = Kind::kAllReduce, .axes = axes, .to = state};
  bool to_target = true;
  int first = kReplicated;
  for (const int axis : axes_) {
    if (contains(axes, axis)) {
      first = state.code[at(axis)];
      to_target &= target_.code[at(axis)] >= 0;
      move.to.code[at(axis)] = kReplicated;
    }
  }
  move.reduce = reduce_of_code(first);
  visit(move);
  move.kind = Kind::kReduceScatter;
  for (const int dim : dims_) {
    move.to = moved(state, axes, dim);
    visit(move);
  }
  if (to_target && (axes & (axes - 1)) != 0) {
    move.to = moved(state, axes, -1);
    visit(move);
  }
}

}  // namespace hypershard::layout::internal
