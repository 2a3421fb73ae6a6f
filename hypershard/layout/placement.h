// How a tensor lies on a mesh: one placement an axis.
// The vocabulary that plans, strategies, checkpoints and messages share.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hypershard/layout/mesh.h"

namespace hypershard::layout {

/// How a tensor lies along one mesh axis.
struct Placement {
  enum class Kind : std::uint8_t {
    kReplicate,  ///< every rank of the axis holds the whole
    kShard,      ///< cut along tensor dimension `dim`
    kPartial,    ///< every rank holds a term; the value is their reduction by `reduce`
    kFlat,       ///< a run of atoms of the flattened rest; applied after all kShard
    kOwned,      ///< whole on one coordinate of the axis, absent on the others
  };
  enum class Reduce : std::uint8_t { kSum, kAvg, kMax, kMin };

  Kind kind = Kind::kReplicate;
  int dim = 0;                   ///< kShard only
  Reduce reduce = Reduce::kSum;  ///< kPartial only

  static Placement replicate() { return {}; }
  static Placement shard(int dim) { return {.kind = Kind::kShard, .dim = dim}; }
  static Placement partial(Reduce reduce = Reduce::kSum) {
    return {.kind = Kind::kPartial, .reduce = reduce};
  }
  static Placement flat() { return {.kind = Kind::kFlat}; }
  static Placement owned() { return {.kind = Kind::kOwned}; }

  /// Tells whether the ranks of the axis hold different parts of the tensor.
  bool splits() const {
    return kind == Kind::kShard || kind == Kind::kFlat || kind == Kind::kOwned;
  }
  bool operator==(const Placement&) const = default;
};
std::string to_text(const Placement& placement);

/// One placement for each axis of a mesh, in the mesh's axis order.
///
/// Several axes that shard one tensor dimension are nested cuts: the first one cuts the whole, the
/// next one each piece. Reductions of several Partial axes are applied from the last mesh axis to
/// the first, which matters only where sums (or averages), maxima and minima meet.
struct Layout {
  std::vector<Placement> placements;
  /// Mesh axes in the order of nested cuts, outermost first; axes that are not listed follow in
  /// mesh order. Matters only for axes that shard the same tensor dimension.
  std::vector<int> cut_order = {};

  /// Lists the mesh axes that shard tensor dimension `dim`, outermost cut first.
  std::vector<int> cut_axes(int dim) const;
  /// Layouts are equal if placements are and nested cuts have the same order, however stated.
  bool operator==(const Layout& other) const;
};

/// Returns the layout of the gradient of a tensor that lies as `layout`: Shard and Replicate stay,
/// Partial becomes Replicate, since each term counts in full.
Layout gradient_layout(const Layout& layout);

/// Prints like `replicate: Replicate, shard: Flat`; nested cuts out of mesh order are added like
/// ` (dimension 0 cut by tp, then dp)`.
std::string to_text(const Layout& layout, const DeviceMesh& mesh);

}  // namespace hypershard::layout
