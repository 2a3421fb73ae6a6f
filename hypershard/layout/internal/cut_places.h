// Why: where a group's buffer may be cut is one rule, used to cut it at first and to balance the
// cuts of several groups later.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "hypershard/layout/packing.h"

namespace hypershard::layout::internal {

/// Places where a cut may fall: begin, begin + atom, ... up to `last`; the next run begins at
/// `end`.
struct CutRun {
  std::int64_t begin = 0;
  std::int64_t atom = 1;
  std::int64_t last = 0;
  std::int64_t end = 0;
};

/// Walks over the cut places of a buffer; cheap as long as the positions asked for move one way.
class CutCursor {
 public:
  explicit CutCursor(std::span<const CutRun> runs) : runs_(runs), numel_(runs.back().end) {}

  /// Returns the last cut place at or before `position` >= 0.
  std::int64_t at_or_before(std::int64_t position) {
    if (position >= numel_) {
      return numel_;
    }
    const CutRun& run = run_at(position);
    return std::min(run.last, position - (position - run.begin) % run.atom);
  }

  /// Returns the cut place nearest to `position` >= 0, of two the first, but no later than `end`.
  std::int64_t nearest(std::int64_t position, std::int64_t end) {
    if (position >= end) {
      return end;
    }
    const CutRun& run = run_at(position);
    const std::int64_t before = std::min(run.last, position - (position - run.begin) % run.atom);
    const std::int64_t after = std::min(end, before == run.last ? run.end : before + run.atom);
    return position - before <= after - position ? before : after;
  }

  /// Returns the first cut place at or after `position` <= numel.
  std::int64_t at_or_after(std::int64_t position) {
    if (position <= 0) {
      return 0;
    }
    const std::int64_t before = at_or_before(position);
    if (before == position) {
      return before;
    }
    const CutRun& run = run_at(position);
    return before == run.last ? run.end : before + run.atom;
  }

 private:
  const CutRun& run_at(std::int64_t position) {
    while (position < runs_[current_].begin) {
      --current_;
    }
    while (position >= runs_[current_].end) {
      ++current_;
    }
    return runs_[current_];
  }

  std::span<const CutRun> runs_;
  std::int64_t numel_ = 0;
  std::size_t current_ = 0;
};

/// Tells whether no parameter has atoms: then a cut may also fall into the padding at the end.
bool may_cut_anywhere(const GroupPacking& packing);

/// Returns the places between which no cut may fall, of an empty buffer none.
std::vector<CutRun> cut_runs(const GroupPacking& packing);

/// Returns the most elements that lie between two neighbouring places.
std::int64_t largest_block(std::span<const CutRun> runs);

}  // namespace hypershard::layout::internal
