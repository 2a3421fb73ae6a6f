// Why: tensors outside shared memory pass through a bounded area; this keeps its books.
// First in, first out, each block contiguous.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>

namespace hypershard::comm::internal {

/// Offsets within one rank's staging area. Steps are taken and given back in order.
class StagingRing {
 public:
  explicit StagingRing(std::int64_t capacity) : capacity_(capacity) {}

  /// Returns the offset of a block for step `step`, or nothing while there is no room.
  std::optional<std::int64_t> take(std::uint64_t step, std::int64_t bytes);
  /// Gives back the blocks of all steps before `step`.
  void release_before(std::uint64_t step);
  std::size_t num_blocks() const { return blocks_.size(); }

 private:
  struct Block {
    std::uint64_t step;
    std::int64_t begin;
    std::int64_t end;
  };
  std::int64_t capacity_;
  std::deque<Block> blocks_;
};

}  // namespace hypershard::comm::internal
