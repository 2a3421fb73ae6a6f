// Why: see bucket.h. Cuts are placed in one pass: from the loads so far follows how much of the
// next group each rank should get, and every cut falls at the place nearest to that.
#include "hypershard/layout/bucket.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <utility>

#include "hypershard/core/error.h"
#include "hypershard/layout/internal/cut_places.h"

namespace hypershard::layout {
namespace {

/// A group with its cut places.
struct Part {
  GroupPacking* packing;
  std::int64_t element_bytes;
  std::vector<internal::CutRun> runs;
  std::int64_t block_bytes;
};

/// How a level lies among the nested cuts.
struct Level {
  std::size_t num_parents = 1;
  std::size_t num_ranks = 1;
  std::size_t num_inner = 1;  ///< pieces of one rank on the levels below
};

Level level_of(std::span<const int> cut_sizes, int level) {
  HS_CHECK(
      level >= 0 && level < std::ssize(cut_sizes),
      "layout.bucket: no level ",
      level,
      " in cut sizes ",
      cut_sizes
  );
  Level found;
  for (int i = 0; i < std::ssize(cut_sizes); ++i) {
    const auto size = static_cast<std::size_t>(cut_sizes[static_cast<std::size_t>(i)]);
    (i < level ? found.num_parents : i == level ? found.num_ranks : found.num_inner) *= size;
  }
  return found;
}

/// Raises the smallest loads to one level with `bytes` more: the sum of what the loads at or below
/// it lack, as a fraction `total / num_filled`.
struct WaterLevel {
  std::int64_t total = 0;
  std::int64_t num_filled = 0;
  std::int64_t last = 0;  ///< loads at or below it are filled up

  bool fills(std::int64_t load) const { return load <= last; }
};

WaterLevel fill(const std::vector<std::int64_t>& loads, std::int64_t bytes) {
  WaterLevel level;
  level.last = std::numeric_limits<std::int64_t>::max();
  // Whoever holds more than the level takes nothing, which lowers the level for the others.
  while (true) {
    WaterLevel next{.total = bytes, .num_filled = 0, .last = 0};
    for (const std::int64_t load : loads) {
      if (level.fills(load)) {
        next.total += load;
        ++next.num_filled;
      }
    }
    next.last = next.total / next.num_filled;
    const bool settled = next.num_filled == level.num_filled;
    level = next;
    if (settled) {
      return level;
    }
  }
}

/// Cuts `[begin, end)` of a group between the ranks and adds each one's part to its load.
class RankCutter {
 public:
  explicit RankCutter(std::size_t num_ranks) : loads_(num_ranks) {}

  void reset() { std::fill(loads_.begin(), loads_.end(), 0); }

  /// Returns the ends of all ranks' parts.
  const std::vector<std::int64_t>& cut(
      const Part& part, internal::CutCursor& cursor, std::int64_t begin, std::int64_t end
  ) {
    ends_.assign(loads_.size(), end);
    const std::int64_t bytes = (end - begin) * part.element_bytes;
    if (bytes == 0) {
      return ends_;
    }
    const WaterLevel level = fill(loads_, bytes);
    const std::int64_t whole = level.total / level.num_filled;
    const std::int64_t rest = level.total % level.num_filled;
    std::int64_t num_before = 0;
    std::int64_t loads_before = 0;
    std::int64_t from = begin;
    for (std::size_t rank = 0; rank < loads_.size(); ++rank) {
      if (level.fills(loads_[rank])) {
        ++num_before;
        loads_before += loads_[rank];
      }
      const std::int64_t filled =
          whole * num_before + rest * num_before / level.num_filled;  // cannot overflow
      const std::int64_t even = begin + (filled - loads_before) / part.element_bytes;
      const std::int64_t to =
          rank + 1 == loads_.size() ? end : std::clamp(cursor.nearest(even, end), from, end);
      loads_[rank] += (to - from) * part.element_bytes;
      ends_[rank] = to;
      from = to;
    }
    return ends_;
  }

 private:
  std::vector<std::int64_t> loads_;
  std::vector<std::int64_t> ends_;
};

/// Cuts each rank's part between the pieces of the levels below.
void cut_inner(
    const Part& part,
    internal::CutCursor& cursor,
    std::size_t num_inner,
    std::size_t first,
    std::int64_t begin,
    std::int64_t end
) {
  std::vector<std::int64_t>& cuts = part.packing->cuts;
  const auto num = static_cast<std::int64_t>(num_inner);
  std::int64_t from = begin;
  for (std::size_t i = 1; i < num_inner; ++i) {
    const auto piece = static_cast<std::int64_t>(i);
    const std::int64_t even =
        begin + (end - begin) / num * piece + (end - begin) % num * piece / num;
    from = std::clamp(cursor.nearest(even, end), from, end);
    cuts[first + i] = from;
  }
  cuts[first + num_inner] = end;
}

std::vector<Part> largest_atoms_first(std::span<const BucketGroup> groups) {
  std::vector<Part> parts;
  for (const BucketGroup& group : groups) {
    HS_CHECK(group.packing != nullptr, "layout.bucket: a group without a packing");
    HS_CHECK_GE(group.element_bytes, 1, "layout.bucket: bytes of an element");
    HS_CHECK(
        group.packing->cut_sizes == groups.front().packing->cut_sizes,
        "layout.bucket: groups of one bucket are cut differently: cut sizes ",
        group.packing->cut_sizes,
        " and ",
        groups.front().packing->cut_sizes,
        HS_HINT("give each mesh's groups buckets of their own")
    );
    std::vector<internal::CutRun> runs = internal::cut_runs(*group.packing);
    const std::int64_t block_bytes = internal::largest_block(runs) * group.element_bytes;
    if (!runs.empty()) {
      parts.push_back({group.packing, group.element_bytes, std::move(runs), block_bytes});
    }
  }
  std::stable_sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) {
    return a.block_bytes > b.block_bytes;
  });
  return parts;
}

}  // namespace

std::int64_t smallest_bucket_bytes(
    double latency_s, double bytes_per_s, int num_ranks, double latency_share
) {
  HS_CHECK(
      latency_share > 0 && latency_share < 1,
      "layout.bucket: latency share ",
      latency_share,
      " (expected more than 0 and less than 1)"
  );
  HS_CHECK_GE(num_ranks, 1, "layout.bucket: ranks of the link");
  HS_CHECK(
      latency_s >= 0 && bytes_per_s > 0,
      "layout.bucket: a link of ",
      latency_s,
      " s and ",
      bytes_per_s,
      " bytes/s (expected a latency of at least 0, a bandwidth above 0)"
  );
  if (num_ranks == 1 || latency_s == 0) {
    return kBucketOfOne;
  }
  const double crossing = latency_s * (1 - latency_share) / latency_share * bytes_per_s;
  const double bytes = std::ceil(crossing * num_ranks / (num_ranks - 1));
  return bytes < 0x1p62 ? static_cast<std::int64_t>(bytes) : kBucketOfAll;
}

std::vector<Bucket> make_buckets(
    std::span<const std::int64_t> unit_bytes, std::int64_t target_bytes
) {
  std::vector<Bucket> buckets;
  Bucket open;
  for (int unit = static_cast<int>(unit_bytes.size()) - 1; unit >= 0; --unit) {
    const std::int64_t bytes = unit_bytes[static_cast<std::size_t>(unit)];
    HS_CHECK_GE(bytes, 0, "layout.bucket: bytes of unit ", unit);
    if (open.num_units() == 0) {
      open = {.begin = unit, .end = unit + 1};
    }
    open.begin = unit;
    open.bytes += bytes;
    if (open.bytes > 0 && open.bytes >= target_bytes) {
      buckets.push_back(std::exchange(open, {}));
    }
  }
  if (open.bytes > 0 || (open.num_units() > 0 && buckets.empty())) {
    buckets.push_back(open);
  } else if (open.num_units() > 0) {
    buckets.back().begin = open.begin;
  }
  return buckets;
}

void balance_cuts(std::span<const BucketGroup> groups, int level) {
  if (groups.empty()) {
    return;
  }
  const std::vector<Part> parts = largest_atoms_first(groups);
  const Level at = level_of(groups.front().packing->cut_sizes, level);
  std::vector<internal::CutCursor> cursors;
  std::vector<internal::CutCursor> inner_cursors;
  for (const Part& part : parts) {
    cursors.emplace_back(part.runs);
    inner_cursors.emplace_back(part.runs);
  }
  RankCutter cutter(at.num_ranks);
  for (std::size_t parent = 0; parent < at.num_parents; ++parent) {
    cutter.reset();
    const std::size_t first = parent * at.num_ranks * at.num_inner;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const std::vector<std::int64_t>& cuts = parts[i].packing->cuts;
      const std::int64_t begin = cuts[first];
      const std::int64_t end = cuts[first + at.num_ranks * at.num_inner];
      std::int64_t from = begin;
      std::size_t piece = first;
      for (const std::int64_t to : cutter.cut(parts[i], cursors[i], begin, end)) {
        cut_inner(parts[i], inner_cursors[i], at.num_inner, piece, from, to);
        from = to;
        piece += at.num_inner;
      }
    }
  }
}

}  // namespace hypershard::layout
