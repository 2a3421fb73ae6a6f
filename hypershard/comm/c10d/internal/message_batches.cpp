// Why: see message_batches.h.
#include "hypershard/comm/c10d/internal/message_batches.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace hypershard::comm::internal {
namespace {

constexpr std::int64_t kMaxPieces = 128;
// Of many slices: 192 that are not joined make up to 48 + 192 pieces and split the others into at
// most 193 + 64 messages.
constexpr std::int64_t kMaxPiecesOfMany = 48;
constexpr std::int64_t kJoinedShare = 4;

std::int64_t divide_up(std::int64_t value, std::int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

}  // namespace

std::vector<Batch> cut_batches(std::span<const std::int64_t> counts, std::int64_t element_bytes) {
  const std::int64_t total = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  const std::int64_t max_pieces = counts.size() == 1 ? kMaxPieces : kMaxPiecesOfMany;
  const std::int64_t piece = std::max(kPieceBytes / element_bytes, divide_up(total, max_pieces));
  std::vector<Batch> batches;
  std::int64_t position = 0;
  Batch joined;
  const auto flush = [&] {
    if (joined.count > 0) {
      batches.push_back(std::exchange(joined, {}));
    }
    joined.first = position;
  };
  for (std::size_t segment = 0; segment < counts.size(); ++segment) {
    const std::int64_t count = counts[segment];
    if (count == 0) {
      continue;
    }
    if (counts.size() > 1 && count < piece / kJoinedShare) {
      if (joined.count + count > piece) {
        flush();
      }
      joined.parts.push_back({segment, 0, count});
      joined.count += count;
      position += count;
      continue;
    }
    flush();
    for (std::int64_t first = 0; first < count; first += piece) {
      const std::int64_t length = std::min(piece, count - first);
      batches.push_back({position, length, {{segment, first, length}}});
      position += length;
    }
    joined.first = position;
  }
  flush();
  return batches;
}

}  // namespace hypershard::comm::internal
