// Shortest path over layouts. Costs are never negative, so the first time the target comes off the
// queue its path is the cheapest.
#include "hypershard/layout/internal/redistribution_search.h"

#include <algorithm>
#include <cstddef>
#include <queue>
#include <string>
#include <tuple>
#include <unordered_map>

#include "hypershard/core/error.h"

namespace hypershard::layout::internal {
namespace {

using Kind = RedistributionStep::Kind;

/// Compared in this order.
struct Cost {
  std::int64_t weighted = 0;
  int collectives = 0;
  int local_steps = 0;
  auto operator<=>(const Cost&) const = default;
};

/// Up to so many ranks, all are asked what they send.
constexpr std::int64_t kSmallGroup = 32;

/// Prices moves by the rank that sends most.
class Prices {
 public:
  Prices(const CutSpace& space, const DeviceMesh& mesh, std::int64_t slow_weight)
      : space_(space),
        mesh_(mesh),
        slow_weight_(slow_weight),
        weights_(std::size_t{1} << space.num_axes(), 0) {}

  Cost of(const CutState& from, const CutMove& move) const {
    if (move.kind < Kind::kAllGather) {
      return {.local_steps = move.dropped ? 0 : 1};
    }
    return {.weighted = weight(move.axes) * busiest(from, move), .collectives = 1};
  }

 private:
  /// Looking at all ranks of a big mesh takes longer than the search: done for groups that occur.
  std::int64_t weight(AxisSet axes) const {
    std::int64_t& weight = weights_[axes];
    if (weight == 0) {
      weight = crosses_supernodes(mesh_, axes) ? slow_weight_ : 1;
    }
    return weight;
  }

  /// Axes outside the group stay at coordinate 0, where pieces are largest.
  std::int64_t busiest(const CutState& from, const CutMove& move) const {
    std::array<int, kMaxAxes> coordinates{};
    const bool all_ranks = move.kind == Kind::kAllToAll;
    if (move.kind == Kind::kReduceScatter) {
      // Who keeps the smallest part sends most: the last one.
      for (int axis = 0; axis < space_.num_axes(); ++axis) {
        coordinates[static_cast<std::size_t>(axis)] =
            contains(move.axes, axis) ? space_.size(axis) - 1 : 0;
      }
    }
    return all_ranks ? busiest_from(from, move, 0, coordinates)
                     : space_.traffic(move.kind, move.axes, from, move.to, coordinates).sent;
  }

  /// Looks at every rank of a small group. Of a large one at the first two and the last coordinate
  /// of each axis, where balanced cuts have their largest and smallest pieces: exact for even cuts.
  std::int64_t busiest_from(
      const CutState& from, const CutMove& move, int axis, std::array<int, kMaxAxes>& coordinates
  ) const {
    if (axis == space_.num_axes()) {
      return space_.traffic(move.kind, move.axes, from, move.to, coordinates).sent;
    }
    if (!contains(move.axes, axis)) {
      return busiest_from(from, move, axis + 1, coordinates);
    }
    std::int64_t most = 0;
    const int last = space_.size(axis) - 1;
    const bool is_small = space_.group_size(move.axes) <= kSmallGroup;
    for (int i = 0; i <= (is_small ? last : std::min(last, 2)); ++i) {
      coordinates[static_cast<std::size_t>(axis)] = is_small || i < 2 ? i : last;
      most = std::max(most, busiest_from(from, move, axis + 1, coordinates));
    }
    coordinates[static_cast<std::size_t>(axis)] = 0;
    return most;
  }

  const CutSpace& space_;
  const DeviceMesh& mesh_;
  std::int64_t slow_weight_;
  mutable std::vector<std::int64_t> weights_;  ///< by set of axes; 0: not known yet
};

/// A state that was reached, by which move, from which other one.
struct Reached {
  CutState state;
  Cost cost;
  std::size_t previous = 0;
  CutMove move;
  bool settled = false;
};

class Search {
 public:
  Search(const CutMoves& moves, const Prices& prices) : moves_(moves), prices_(prices) {}

  std::vector<CutMove> run(const CutState& from, const CutState& to) {
    reach(from, {}, 0, {});
    while (!queue_.empty()) {
      const std::size_t index = std::get<1>(queue_.top());
      queue_.pop();
      if (reached_[index].settled) {
        continue;
      }
      reached_[index].settled = true;
      const CutState state = reached_[index].state;
      const Cost cost = reached_[index].cost;
      if (state == to) {
        return path_to(index);
      }
      moves_.for_each(state, [&](const CutMove& move) {
        const Cost more = prices_.of(state, move);
        reach(
            move.to,
            {cost.weighted + more.weighted,
             cost.collectives + more.collectives,
             cost.local_steps + more.local_steps},
            index,
            move
        );
      });
    }
    HS_FAIL(InternalError, "layout.redistribution: no steps lead to the target (expected some)");
  }

 private:
  void reach(const CutState& state, const Cost& cost, std::size_t previous, const CutMove& move) {
    const auto [found, is_new] = index_of_.try_emplace(state, reached_.size());
    if (is_new) {
      reached_.push_back({.state = state, .cost = cost, .previous = previous, .move = move});
    } else {
      Reached& known = reached_[found->second];
      if (known.settled || cost >= known.cost) {
        return;
      }
      known.cost = cost;
      known.previous = previous;
      known.move = move;
    }
    queue_.emplace(cost, found->second);
  }

  std::vector<CutMove> path_to(std::size_t index) const {
    std::vector<CutMove> path;
    for (; index != 0; index = reached_[index].previous) {
      path.push_back(reached_[index].move);
    }
    std::reverse(path.begin(), path.end());
    return path;
  }

  const CutMoves& moves_;
  const Prices& prices_;
  std::vector<Reached> reached_;
  std::unordered_map<CutState, std::size_t, CutStateHash> index_of_;
  // The index breaks ties: states are numbered in the order of the moves, which is fixed.
  using Entry = std::tuple<Cost, std::size_t>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue_;
};

}  // namespace

bool crosses_supernodes(const DeviceMesh& mesh, AxisSet axes) {
  if (mesh.topology().num_supernodes() == 1) {
    return false;
  }
  std::vector<std::string> names;
  for (int axis = 0; axis < mesh.num_axes(); ++axis) {
    if (contains(axes, axis)) {
      names.push_back(mesh.axes()[static_cast<std::size_t>(axis)].name);
    }
  }
  return mesh.tier(names) == Tier::kInter;
}

std::vector<CutMove> cheapest_moves(
    const CutSpace& space,
    const DeviceMesh& mesh,
    const CutState& from,
    const CutState& to,
    std::int64_t slow_weight
) {
  if (from == to) {
    return {};
  }
  const CutMoves moves(space, mesh, from, to);
  const Prices prices(space, mesh, slow_weight);
  return Search(moves, prices).run(from, to);
}

}  // namespace hypershard::layout::internal
