// Why: both ends of a message must agree on where it begins and ends to the element, for one tensor
// as for many; how slices are cut into messages is arithmetic on what all ranks know.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace hypershard::comm::internal {

/// A message of this size is summed while the next one arrives, and while it is in the cache.
inline constexpr std::int64_t kPieceBytes = 1 << 20;

/// A run of one segment's slice. Units: elements.
struct BatchPart {
  std::size_t segment = 0;
  std::int64_t first = 0;  ///< within the slice
  std::int64_t count = 0;
};

/// What one message carries: a run of all slices of a rank, laid end to end. Units: elements.
struct Batch {
  std::int64_t first = 0;  ///< within the slices laid end to end
  std::int64_t count = 0;
  std::vector<BatchPart> parts;  ///< one, unless slices were joined
};

/// Cuts a rank's slices (by segment) into messages.
///
/// A slice is cut into pieces that can go out from where they lie; slices of less than a quarter of
/// a piece are joined with their neighbours, since a message costs more than to copy them. Pieces
/// grow with the whole, so that messages stay few: at most 128 of one slice, fewer than
/// kMaxMessageIndex of many.
std::vector<Batch> cut_batches(std::span<const std::int64_t> counts, std::int64_t element_bytes);

}  // namespace hypershard::comm::internal
