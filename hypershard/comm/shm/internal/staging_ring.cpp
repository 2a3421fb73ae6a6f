// Why: see staging_ring.h. The used part may wrap around the end; it never fills the area to the
// last byte, so that `full` and `empty` cannot be confused.
#include "hypershard/comm/shm/internal/staging_ring.h"

namespace hypershard::comm::internal {

std::optional<std::int64_t> StagingRing::take(std::uint64_t step, std::int64_t bytes) {
  constexpr std::int64_t kLine = 64;
  const std::int64_t size = (bytes + kLine - 1) / kLine * kLine;
  std::int64_t begin = 0;
  if (blocks_.empty()) {
    if (size > capacity_) {
      return std::nullopt;
    }
  } else {
    const std::int64_t head = blocks_.back().end;
    const std::int64_t tail = blocks_.front().begin;
    if (head > tail) {
      begin = head + size <= capacity_ ? head : 0;
      if (begin == 0 && size >= tail) {
        return std::nullopt;
      }
    } else {
      begin = head;
      if (head + size >= tail) {
        return std::nullopt;
      }
    }
  }
  blocks_.push_back({step, begin, begin + size});
  return begin;
}

void StagingRing::release_before(std::uint64_t step) {
  while (!blocks_.empty() && blocks_.front().step < step) {
    blocks_.pop_front();
  }
}

}  // namespace hypershard::comm::internal
