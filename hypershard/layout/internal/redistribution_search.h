// The search behind plan_redistribution: states, the steps between them, and the cheapest path.
// Why a search: which order of steps is cheapest depends on sizes, nesting and tiers at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "hypershard/layout/internal/cut_state.h"
#include "hypershard/layout/redistribution.h"

namespace hypershard::layout::internal {

/// Tells whether the groups over `axes` have ranks in two supernodes.
bool crosses_supernodes(const DeviceMesh& mesh, AxisSet axes);

/// One edge of the search graph. `dropped` edges only change the name of what every rank has.
struct CutMove {
  RedistributionStep::Kind kind = RedistributionStep::Kind::kSlice;
  AxisSet axes = 0;
  Placement::Reduce reduce = Placement::Reduce::kSum;
  CutState to = {};
  bool dropped = false;
};

/// What a search may do. Built once from source and target.
class CutMoves {
 public:
  CutMoves(const CutSpace& space, const DeviceMesh& mesh, const CutState& from, const CutState& to);

  /// Calls `visit` for each step that may follow `state`, always in the same order.
  void for_each(const CutState& state, const std::function<void(const CutMove&)>& visit) const;

 private:
  using Visit = std::function<void(const CutMove&)>;
  /// Dimensions that source and target cut, and `num_extra` more to scatter over.
  void choose_dims(const CutState& from, std::size_t num_extra);
  /// Axes that change, and those that must move for their sake.
  AxisSet acting_axes(const CutState& from) const;
  bool is_in_the_way(const CutState& from, int axis, AxisSet acting) const;
  void local_moves(const CutState& state, int axis, const Visit& visit) const;
  void partial_moves(const CutState& state, int axis, const Visit& visit) const;
  void gathers_and_exchanges(const CutState& state, AxisSet axes, const Visit& visit) const;
  void reductions(const CutState& state, AxisSet axes, const Visit& visit) const;
  bool may_reduce(const CutState& state, AxisSet axes) const;
  /// Takes the cuts of `axes` away, then puts them on dimension `dim` (< 0: where the target has
  /// them) inside all others.
  CutState moved(const CutState& state, AxisSet axes, int dim) const;

  const CutSpace& space_;
  CutState target_;
  std::vector<int> dims_;  ///< that axes may be sharded on
  std::vector<int> axes_;  ///< that may be acted on
  std::vector<AxisSet> groups_;
};

/// Returns the cheapest moves from `from` to `to`; what "cheapest" means is documented at
/// plan_redistribution.
std::vector<CutMove> cheapest_moves(
    const CutSpace& space,
    const DeviceMesh& mesh,
    const CutState& from,
    const CutState& to,
    std::int64_t slow_weight
);

}  // namespace hypershard::layout::internal
