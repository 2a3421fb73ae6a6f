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
struct Layout {
  std::vector<Placement> placements;
  bool operator==(const Layout&) const = default;
};
/// Prints like `replicate: Replicate, shard: Flat`.
std::string to_text(const Layout& layout, const DeviceMesh& mesh);

}  // namespace hypershard::layout
