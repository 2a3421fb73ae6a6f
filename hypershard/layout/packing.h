// Packs the parameters of a group into one contiguous buffer and cuts it between ranks.
// Offsets are final: a shard lies in the buffer where the gathered parameters are read.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace hypershard::layout {

/// What the planner must place: one logical parameter.
struct PackRequest {
  std::string name;
  /// Global logical shape; {} is a scalar, a zero dimension makes an empty tensor.
  std::vector<std::int64_t> shape;
  /// A cut never falls inside an atom of so many elements, counted from the parameter's start.
  std::int64_t atom_numel = 1;
};

/// Where one parameter lies. Units: elements.
struct Segment {
  std::string name;
  std::vector<std::int64_t> shape;
  std::int64_t offset = 0;
  std::int64_t numel = 0;
  std::int64_t atom_numel = 1;
};

/// A half-open range of elements of a group's buffer.
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t numel() const { return end - begin; }
  bool operator==(const Range&) const = default;
};
/// Returns the common part of two ranges, empty (begin == end) if there is none.
Range intersect(Range a, Range b);

/// How `pack_group` cuts and aligns a group.
struct PackOptions {
  /// Sizes of the nested cuts, first cut first: {shard, replicate}, as `split_axes` lists them.
  /// The product is the number of pieces; an empty list leaves the buffer whole.
  std::vector<int> cut_sizes = {1};
  /// Segment offsets and even cuts are multiples of this many elements.
  std::int64_t alignment = 16;
};

/// The packing of one group: segments in request order, and the cuts between pieces.
///
/// Pieces: piece p covers [cuts[p], cuts[p+1]); piece index = shard coordinate * replicate size +
/// replicate coordinate, which is the order of `mesh.group({shard, replicate}, rank)`.
/// Padding (between segments and at the end) belongs to no parameter and is always zero. No cut
/// falls into the padding between segments; that at the end of even cuts may fill whole pieces.
struct GroupPacking {
  std::vector<Segment> segments;
  std::vector<int> cut_sizes;
  /// Has product(cut_sizes) + 1 entries, ascending, the first 0, the last numel.
  std::vector<std::int64_t> cuts;
  std::int64_t numel = 0;       ///< with padding; a multiple of the alignment
  std::int64_t used_numel = 0;  ///< without
  std::int64_t alignment = 1;

  std::int64_t padding_numel() const { return numel - used_numel; }
  /// Returns the largest piece over the mean piece, padding included; 1 is perfect, and the value
  /// of an empty group.
  double imbalance() const;
  /// Returns the range that coordinates `coords` (one a level, for the first coords.size() levels
  /// of `cut_sizes`) own together: {} is the whole buffer, {j} shard piece j, {j, i} its replicate
  /// piece i.
  /// Errors: InvalidArgument if there are too many coordinates or one is out of range.
  Range range(std::span<const int> coords) const;
  /// Returns the element counts of the pieces of the next level inside `coords`, in order.
  /// Errors: as `range`, and InvalidArgument if `coords` leaves no level.
  std::vector<std::int64_t> counts(std::span<const int> coords) const;
};

/// Packs parameters in the order given.
///
/// With atoms of 1 the cuts are even (the end is padded to pieces of equal size). A larger atom in
/// any non-empty parameter gives uneven cuts that never fall inside an atom: the largest piece is
/// the smallest possible, and each cut as near to the even one as that allows, so that outer pieces
/// balance too. Among such parameters, one with atoms of 1 is cut at multiples of the alignment.
/// Equal requests and options give equal packings on every rank.
/// Errors: InvalidArgument for a negative dimension, an atom that is < 1 or does not divide its
/// parameter (both name the parameter), a cut size or alignment < 1, or more than 2^60 elements.
GroupPacking pack_group(std::span<const PackRequest> requests, const PackOptions& options);

}  // namespace hypershard::layout
