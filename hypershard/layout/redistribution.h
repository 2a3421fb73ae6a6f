// How a tensor gets from one layout to another: the cheapest list of collectives and local steps.
// Integers only: production mode, the explain report and tests read the same list.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "hypershard/layout/mesh.h"
#include "hypershard/layout/placement.h"

namespace hypershard::layout {

/// One step of a redistribution, on plain local tensors. Equal on all ranks.
struct RedistributionStep {
  enum class Kind : std::uint8_t {
    kSlice,      ///< keep this rank's part of a replicated dimension; no communication
    kEmbed,      ///< put the local part into a whole filled with the reduction's neutral element
    kMask,       ///< keep the value on coordinate 0 of the axis, zeros elsewhere
    kScale,      ///< multiply by the axis size or its inverse, between Partial sum and avg
    kAllGather,  ///< join the parts of `axes`
    kReduceScatter,  ///< reduce over `axes` and keep a part
    kAllReduce,      ///< reduce over `axes`
    kAllToAll,       ///< each rank sends every other one what it needs: other dimensions or orders
  };
  Kind kind = Kind::kSlice;
  std::vector<int> axes;  ///< mesh axes, ascending; more than one: a joint group in that order
  Placement::Reduce reduce = Placement::Reduce::kSum;  ///< reductions, kEmbed, kMask
  Layout from;
  Layout to;

  bool communicates() const { return kind >= Kind::kAllGather; }
};
std::string to_text(RedistributionStep::Kind kind);
/// Prints like `reduce_scatter over tp (Partial(sum) -> Shard(1))`.
std::string to_text(const RedistributionStep& step, const DeviceMesh& mesh);

/// What one rank sends and receives in a step. Units: elements.
struct Traffic {
  std::int64_t sent = 0;
  std::int64_t received = 0;
  bool operator==(const Traffic&) const = default;
};

/// Counts what `rank` sends and receives in `step` on a tensor of global shape `shape`.
///
/// Exact, with uneven cuts: a gather sends the rank's part to each other rank, a reduce-scatter all
/// but its own part, an all-to-all what others need. An all-reduce counts as 2 (n - 1) / n of the
/// local tensor, rounded up, however the back end does it. Local steps count 0.
/// Errors: InvalidArgument for a rank out of range.
Traffic step_traffic(
    const RedistributionStep& step,
    std::span<const std::int64_t> shape,
    const DeviceMesh& mesh,
    int rank
);

/// What the search minimises.
struct RedistributionOptions {
  /// An element that crosses supernodes costs as much as so many inside one. A group with ranks in
  /// two supernodes counts as slow for all that it moves.
  std::int64_t slow_weight = 8;
};

/// Finds the cheapest steps from layout `from` to layout `to` of a tensor of global shape `shape`.
///
/// Cheapest: the sum over steps of what the busiest rank sends (weighted, see the options), then
/// the number of collectives, then of local steps; remaining ties are broken in a fixed order, so
/// that all ranks get the same list. Exact over the placements that `from` and `to` use, Replicate
/// and one or two more dimensions to scatter a reduction or a slow gather over; an all-to-all over
/// several axes only goes to placements of `to`. Hierarchical reductions and gathers between
/// supernodes come out of the weights. Partial axes of different kinds are reduced from the last to
/// the first. Uneven exchanges of more than 32 ranks are priced by a sample of
/// them. Axes of size 1 are never acted on. An empty list: nothing to do, a rank's local
/// tensor stays as it is. For example Partial -> Shard is one reduce-scatter, Shard(0) -> Shard(1)
/// one all-to-all, Shard or Replicate -> Partial moves nothing. Errors: InvalidArgument as
/// check_spec for either layout; Unsupported on more than 8 axes.
std::vector<RedistributionStep> plan_redistribution(
    std::span<const std::int64_t> shape,
    const Layout& from,
    const Layout& to,
    const DeviceMesh& mesh,
    const RedistributionOptions& options = {}
);

/// Writes one line a step with the bytes that `rank` sends and receives, or `nothing to do`.
std::string to_text(
    std::span<const RedistributionStep> steps,
    std::span<const std::int64_t> shape,
    const DeviceMesh& mesh,
    int rank,
    std::int64_t element_bytes
);

}  // namespace hypershard::layout
