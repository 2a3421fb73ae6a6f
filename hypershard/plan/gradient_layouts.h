// How gradients lie, derived from the forward alone.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "hypershard/layout/mesh.h"
#include "hypershard/layout/placement.h"
#include "hypershard/plan/tape.h"

namespace hypershard::plan {

/// NOTE [gradient law]: the gradient of an operator's operand lies, on each mesh axis by itself,
///
///   operand Shard(d)   -> Shard(d)
///   operand Partial    -> Replicate: every rank's term has the whole's gradient
///   operand Replicate  -> as the results' gradient, if ALL operands are Replicate on the axis
///                         (the ranks then do the same work), else Partial(sum): each rank saw its
///                         part of the work only
///
/// and a result's gradient is Shard(d) for Shard(d) and Replicate for Partial. Gradients of several
/// uses are summed, so they must lie alike: a Replicate beside a Partial gradient means that a
/// boundary is missing before one of the uses. A boundary hands on, on the axes that the plan names
/// for it, the gradient that belongs to what arrived: Shard(d) for Shard(d), Replicate otherwise;
/// on other axes the gradient as it came.

/// Two uses of one value whose gradients cannot be summed; or results of one operator.
struct GradientConflict {
  int value = -1;  ///< of the tape
  int axis = 0;
  int replicate_use = -1;   ///< operator that hands back a Replicate gradient
  int partial_use = -1;     ///< operator that hands back a Partial one
  int partial_origin = -1;  ///< the one behind it where a whole operand met a cut or partial one
};

/// The gradient on both sides of a boundary.
struct BoundaryGradient {
  int op = -1;              ///< of the tape
  layout::Layout arriving;  ///< of what the boundary handed on
  layout::Layout leaving;   ///< of what had arrived in forward
};

/// What the reverse pass finds.
struct GradientLayouts {
  std::vector<std::optional<layout::Layout>> of_value;  ///< none: no gradient reaches it
  std::vector<BoundaryGradient> boundaries;             ///< in backward order
  std::vector<GradientConflict> conflicts;  ///< the pass went on as if the gradient were Partial
};

/// Walks the tape backwards from `seeds`, the values that the caller differentiates, whose
/// gradients lie as the law says for results (Replicate for Replicate).
///
/// Values that take no gradient get none. Errors: InternalError if a seed is not on the tape.
GradientLayouts derive_gradients(
    const Tape& tape, std::span<const int> seeds, const layout::DeviceMesh& mesh
);

}  // namespace hypershard::plan
