// A layout as the search for redistributions handles it: fixed-size, hashable, with the nesting of
// cuts normalised. Small enough that thousands are made for one plan.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "hypershard/layout/mesh.h"
#include "hypershard/layout/packing.h"
#include "hypershard/layout/placement.h"
#include "hypershard/layout/redistribution.h"

namespace hypershard::layout::internal {

inline constexpr int kMaxAxes = 8;
/// A set of mesh axes, bit i for axis i.
using AxisSet = std::uint32_t;
inline bool contains(AxisSet set, int axis) {
  return ((set >> axis) & 1U) != 0;
}

/// Placements as small integers: a dimension >= 0 for Shard, else one of these.
inline constexpr int kReplicated = -1;
inline constexpr int kFirstPartial = -2;  ///< less the number of the reduction
inline int partial_code(Placement::Reduce reduce) {
  return kFirstPartial - static_cast<int>(reduce);
}
inline bool is_partial_code(int code) {
  return code <= kFirstPartial;
}
inline Placement::Reduce reduce_of_code(int code) {
  return static_cast<Placement::Reduce>(kFirstPartial - code);
}

/// Placement of each axis, and for sharded ones how deep the cut is nested within its dimension.
struct CutState {
  std::array<std::int8_t, kMaxAxes> code{};
  std::array<std::int8_t, kMaxAxes> level{};
  bool operator==(const CutState&) const = default;
};
struct CutStateHash {
  std::size_t operator()(const CutState& state) const;
};

/// Shape and axis sizes that all states of one search share, and what can be asked of a state.
class CutSpace {
 public:
  /// Errors: Unsupported on more than kMaxAxes axes.
  CutSpace(std::span<const std::int64_t> shape, const DeviceMesh& mesh);

  int num_axes() const { return num_axes_; }
  int size(int axis) const { return sizes_[static_cast<std::size_t>(axis)]; }
  const std::vector<std::int64_t>& shape() const { return shape_; }
  std::int64_t group_size(AxisSet axes) const;

  /// Axes of size 1 become Replicate, so that equal partitions are equal states.
  CutState state_of(const Layout& layout) const;
  /// Axes of size 1 get their placements from `unused`.
  Layout layout_of(const CutState& state, const Layout& unused) const;

  int num_cuts(const CutState& state, int dim) const;
  /// Tells whether the cuts of `axes` are nested inside all other cuts of the same dimensions.
  bool is_innermost(const CutState& state, AxisSet axes) const;

  /// Returns what the rank at `coordinates` holds of `dim`.
  Range range(const CutState& state, int dim, std::span<const int> coordinates) const;
  std::int64_t numel(const CutState& state, std::span<const int> coordinates) const;

  /// Counts what the rank at `coordinates` sends and receives. See step_traffic.
  Traffic traffic(
      RedistributionStep::Kind kind,
      AxisSet axes,
      const CutState& from,
      const CutState& to,
      std::span<const int> coordinates
  ) const;

 private:
  std::vector<std::int64_t> shape_;
  int num_axes_;
  std::array<int, kMaxAxes> sizes_{};
};

}  // namespace hypershard::layout::internal
