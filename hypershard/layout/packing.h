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
  std::vector<std::int64_t>
      shape;  ///< global logical shape; {} is a scalar, a zero dimension an empty tensor
  std::int64_t atom_numel = 1;  ///< a cut never falls inside an atom of so many elements
};

/// Where one parameter lies. Units: elements.
struct Segment {
  std::string name;
  std::vector<std::int64_t> shape;
  std::int64_t offset = 0;
  std::int64_t numel = 0;
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

struct PackOptions {
  /// Sizes of the nested cuts, outermost first: {shard, replicate}. The product is the number of
  /// pieces.
  std::vector<int> cut_sizes = {1};
  /// Segment offsets and even cuts are multiples of this many elements.
  std::int64_t alignment = 16;
};

/// The packing of one group: segments in request order, and the cuts between pieces.
///
/// Pieces: piece p covers [cuts[p], cuts[p+1]); piece index = shard coordinate * replicate size +
/// replicate coordinate. Padding (between segments and at the end) belongs to no parameter and is
/// always zero.
struct GroupPacking {
  std::vector<Segment> segments;
  std::vector<int> cut_sizes;
  std::vector<std::int64_t>
      cuts;                     ///< product(cut_sizes) + 1 entries, ascending, first 0, last numel
  std::int64_t numel = 0;       ///< with padding
  std::int64_t used_numel = 0;  ///< without

  std::int64_t padding_numel() const { return numel - used_numel; }
  /// Returns the largest piece over the mean piece; 1 is perfect, also for an empty group.
  double imbalance() const;
  /// Returns the range that coordinates `coords` (one a level, for the first coords.size() levels
  /// of `cut_sizes`) own together: {} is the whole buffer, {j} shard piece j, {j, i} its replicate
  /// piece i. Errors: InvalidArgument if there are too many coordinates or one is out of range.
  Range range(std::span<const int> coords) const;
  /// Returns the element counts of the pieces of one level inside `coords`, in order.
  std::vector<std::int64_t> counts(std::span<const int> coords) const;
};

/// Packs parameters in the order given.
///
/// With atoms of 1 the cuts are even (the end is padded to pieces of equal size); larger atoms give
/// uneven cuts, balanced by element count, that never fall inside an atom. Errors: InvalidArgument
/// for a negative dimension, an atom that does not divide its parameter, or a size < 1; names the
/// parameter.
GroupPacking pack_group(std::span<const PackRequest> requests, const PackOptions& options);

}  // namespace hypershard::layout
