// Which part of a tensor lies on which rank: the arithmetic behind every Shard placement.
// Integers only, so that plans for ranks that are not here cost nothing.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "hypershard/layout/mesh.h"
#include "hypershard/layout/packing.h"
#include "hypershard/layout/tensor_spec.h"

namespace hypershard::layout {

/// Returns piece `index` of a balanced cut of [0, size): the first size % num_pieces pieces have
/// one element more than the others, so that pieces may be empty. Errors: InvalidArgument if size <
/// 0, num_pieces < 1 or the index is out of range.
Range cut_piece(std::int64_t size, int num_pieces, int index);

/// Returns piece `index` of a balanced cut of `whole`. Precondition: as the checks of cut_piece.
Range nested_piece(Range whole, int num_pieces, int index);

/// Checks that a layout can describe a tensor on `mesh`: one placement an axis, dimensions in range
/// (negative ones are refused, they depend on the tensor), no Flat or Owned, sizes >= 0, and
/// `cut_order` of known axes, each once.
/// Errors: InvalidArgument naming tensor shape, axis, what was found and what to do.
void check_spec(const TensorSpec& spec, const DeviceMesh& mesh);

/// Returns a layout that is Replicate on every axis of `mesh`.
Layout replicated_layout(const DeviceMesh& mesh);

/// Returns what the rank at `coordinates` (one a mesh axis) holds: one range a tensor dimension.
///
/// Axes that shard one dimension are nested balanced cuts in the order of `Layout::cut_axes`; other
/// placements leave the whole. Precondition: `check_spec` has passed.
std::vector<Range> local_ranges(
    const TensorSpec& spec, const DeviceMesh& mesh, std::span<const int> coordinates
);

/// Returns the local shape on `rank`; its product may be 0.
/// Errors: as check_spec, and InvalidArgument for a rank out of range.
std::vector<std::int64_t> local_shape(const TensorSpec& spec, const DeviceMesh& mesh, int rank);

/// Returns the global index of the local tensor's first element, one entry a dimension.
/// Errors: as local_shape.
std::vector<std::int64_t> local_offset(const TensorSpec& spec, const DeviceMesh& mesh, int rank);

/// Returns what the ranks along mesh axis `axis` hold of tensor dimension `dim`, by coordinate; the
/// other coordinates are those of `rank`. Errors: as local_shape, and for `axis` or `dim` out of
/// range.
std::vector<Range> ranges_along(
    const TensorSpec& spec, const DeviceMesh& mesh, int rank, int axis, int dim
);

}  // namespace hypershard::layout
