// Why: see cut_places.h.
#include "hypershard/layout/internal/cut_places.h"

namespace hypershard::layout::internal {

bool may_cut_anywhere(const GroupPacking& packing) {
  return std::none_of(packing.segments.begin(), packing.segments.end(), [](const Segment& segment) {
    return segment.atom_numel > 1 && segment.numel > 0;
  });
}

std::vector<CutRun> cut_runs(const GroupPacking& packing) {
  std::vector<CutRun> runs;
  if (may_cut_anywhere(packing)) {
    if (packing.numel > 0) {
      const std::int64_t atom = packing.alignment;
      runs.push_back({.atom = atom, .last = packing.numel - atom, .end = packing.numel});
    }
    return runs;
  }
  for (const Segment& segment : packing.segments) {
    if (segment.numel == 0) {
      continue;
    }
    if (!runs.empty()) {
      runs.back().end = segment.offset;
    }
    // Where any element may be cut, keep the cuts aligned.
    const std::int64_t atom = segment.atom_numel == 1 ? packing.alignment : segment.atom_numel;
    const std::int64_t last = segment.offset + (segment.numel - 1) / atom * atom;
    runs.push_back({.begin = segment.offset, .atom = atom, .last = last, .end = packing.numel});
  }
  return runs;
}

std::int64_t largest_block(std::span<const CutRun> runs) {
  std::int64_t block = 0;
  for (const CutRun& run : runs) {
    block = std::max({block, run.last > run.begin ? run.atom : 0, run.end - run.last});
  }
  return block;
}

}  // namespace hypershard::layout::internal
