// Lays parameters out one after another and cuts the buffer between ranks.
// Cuts minimise the largest piece; among those cuts they keep close to the even ones.
#include "hypershard/layout/packing.h"

#include <algorithm>
#include <limits>

#include "hypershard/core/error.h"
#include "hypershard/layout/internal/cut_places.h"

namespace hypershard::layout {
namespace {

// Leaves room to add two positions; 2^60 elements are beyond any memory.
constexpr std::int64_t kMaxNumel = std::int64_t{1} << 60;

std::int64_t divide_up(std::int64_t value, std::int64_t divisor) {
  return value / divisor + (value % divisor != 0 ? 1 : 0);
}

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return divide_up(value, multiple) * multiple;
}

/// Tells whether pieces of at most `limit` elements, `num_pieces` of them, cover the buffer.
bool covers(std::span<const internal::CutRun> runs, std::int64_t num_pieces, std::int64_t limit) {
  internal::CutCursor cursor(runs);
  const std::int64_t numel = runs.back().end;
  std::int64_t position = 0;
  for (std::int64_t piece = 0; piece < num_pieces && position < numel; ++piece) {
    position = cursor.at_or_before(position + limit);
  }
  return position == numel;
}

/// Finds the smallest size that the largest piece can have.
std::int64_t smallest_limit(std::span<const internal::CutRun> runs, std::int64_t num_pieces) {
  const std::int64_t block = internal::largest_block(runs);
  const std::int64_t mean = divide_up(runs.back().end, num_pieces);
  std::int64_t low = std::max(mean, block);
  // Covers, since a greedy piece falls short of its limit by less than a block.
  std::int64_t high = mean + block;
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    if (covers(runs, num_pieces, middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

std::vector<std::int64_t> balanced_cuts(
    std::span<const internal::CutRun> runs, std::int64_t num_pieces
) {
  const std::int64_t limit = smallest_limit(runs, num_pieces);
  const std::int64_t numel = runs.back().end;
  const auto last = static_cast<std::size_t>(num_pieces);
  std::vector<std::int64_t> cuts(last + 1, numel);
  // From the right: the lowest cuts that leave a rest which the later pieces can cover.
  internal::CutCursor lowest(runs);
  for (std::size_t i = last; i-- > 0;) {
    cuts[i] = lowest.at_or_after(cuts[i + 1] - limit);
  }
  HS_ASSERT(
      cuts[0] == 0, "layout.packing: pieces of ", limit, " do not cover ", numel, " elements"
  );
  // From the left: each cut as near to the even one as its neighbours allow.
  internal::CutCursor nearest(runs);
  internal::CutCursor highest(runs);
  for (std::size_t i = 1; i < last; ++i) {
    const auto piece = static_cast<std::int64_t>(i);
    const std::int64_t even =
        numel / num_pieces * piece + numel % num_pieces * piece / num_pieces;  // cannot overflow
    const std::int64_t before = nearest.at_or_before(even);
    const std::int64_t after = nearest.at_or_after(even);
    cuts[i] = std::clamp(
        even - before <= after - even ? before : after,
        std::max(cuts[i], cuts[i - 1]),
        highest.at_or_before(cuts[i - 1] + limit)
    );
  }
  return cuts;
}

std::int64_t checked_numel(const PackRequest& request) {
  std::int64_t numel = 1;
  for (const std::int64_t size : request.shape) {
    HS_CHECK(
        size >= 0,
        "layout.packing: parameter '",
        request.name,
        "' has a negative dimension: shape ",
        request.shape,
        " (expected sizes of at least 0)"
    );
    numel = size == 0 ? 0 : numel;
  }
  for (const std::int64_t size : request.shape) {
    HS_CHECK(
        numel == 0 || size <= kMaxNumel / numel,
        "layout.packing: parameter '",
        request.name,
        "' has too many elements: shape ",
        request.shape,
        " (expected at most ",
        kMaxNumel,
        ")"
    );
    numel *= size;
  }
  HS_CHECK(
      request.atom_numel >= 1 && numel % request.atom_numel == 0,
      "layout.packing: parameter '",
      request.name,
      "' of ",
      numel,
      " elements, shape ",
      request.shape,
      ", cannot be cut in atoms of ",
      request.atom_numel,
      HS_HINT("the atom must be at least 1 and divide the element count")
  );
  return numel;
}

void place_segments(
    std::span<const PackRequest> requests, std::int64_t alignment, GroupPacking& packing
) {
  std::int64_t position = 0;
  packing.segments.reserve(requests.size());
  for (const PackRequest& request : requests) {
    const std::int64_t numel = checked_numel(request);
    const std::int64_t offset = round_up(position, alignment);
    position = offset + numel;
    packing.used_numel += numel;
    HS_CHECK(
        position <= kMaxNumel,
        "layout.packing: the group has too many elements: ",
        position,
        " with parameter '",
        request.name,
        "' (expected at most ",
        kMaxNumel,
        ")"
    );
    packing.segments.push_back(
        {.name = request.name,
         .shape = request.shape,
         .offset = offset,
         .numel = numel,
         .atom_numel = request.atom_numel}
    );
  }
  packing.numel = round_up(position, alignment);
}

std::int64_t num_pieces_of(std::span<const int> cut_sizes) {
  std::int64_t num_pieces = 1;
  for (const int size : cut_sizes) {
    HS_CHECK(
        size >= 1,
        "layout.packing: cut sizes ",
        cut_sizes,
        " contain ",
        size,
        " (expected at least 1)"
    );
    HS_CHECK(
        size <= std::numeric_limits<int>::max() / num_pieces,
        "layout.packing: cut sizes ",
        cut_sizes,
        " make too many pieces (expected at most ",
        std::numeric_limits<int>::max(),
        ")"
    );
    num_pieces *= size;
  }
  return num_pieces;
}

void cut_evenly(std::int64_t num_pieces, std::int64_t alignment, GroupPacking& packing) {
  const std::int64_t piece_numel = round_up(divide_up(packing.numel, num_pieces), alignment);
  HS_CHECK(
      piece_numel <= kMaxNumel / num_pieces,
      "layout.packing: ",
      num_pieces,
      " pieces of ",
      piece_numel,
      " elements are too many (expected at most ",
      kMaxNumel,
      " in all)",
      HS_HINT("the alignment is ", alignment, ": lower it")
  );
  packing.numel = num_pieces * piece_numel;
  for (std::int64_t piece = 0; piece <= num_pieces; ++piece) {
    packing.cuts.push_back(piece * piece_numel);
  }
}

}  // namespace

Range intersect(Range a, Range b) {
  const std::int64_t begin = std::max(a.begin, b.begin);
  return {.begin = begin, .end = std::max(begin, std::min(a.end, b.end))};
}

double GroupPacking::imbalance() const {
  if (numel == 0) {
    return 1.0;
  }
  std::int64_t largest = 0;
  for (std::size_t i = 1; i < cuts.size(); ++i) {
    largest = std::max(largest, cuts[i] - cuts[i - 1]);
  }
  const auto num_pieces = static_cast<double>(cuts.size() - 1);
  return static_cast<double>(largest) * num_pieces / static_cast<double>(numel);
}

Range GroupPacking::range(std::span<const int> coords) const {
  HS_CHECK(
      coords.size() <= cut_sizes.size(),
      "layout.packing: ",
      coords.size(),
      " coordinates ",
      coords,
      " for a buffer cut ",
      cut_sizes.size(),
      " times: ",
      cut_sizes,
      HS_HINT("give at most one coordinate for each level of cut_sizes")
  );
  std::size_t first = 0;
  auto num_pieces = static_cast<std::size_t>(num_pieces_of(cut_sizes));
  HS_CHECK(
      cuts.size() == num_pieces + 1,
      "layout.packing: ",
      cuts.size(),
      " cuts for cut sizes ",
      cut_sizes,
      " (expected ",
      num_pieces + 1,
      ")",
      HS_HINT("make a GroupPacking with pack_group")
  );
  for (std::size_t level = 0; level < coords.size(); ++level) {
    HS_CHECK(
        coords[level] >= 0 && coords[level] < cut_sizes[level],
        "layout.packing: coordinate ",
        coords[level],
        " of level ",
        level,
        " is out of range: coordinates ",
        coords,
        ", cut sizes ",
        cut_sizes
    );
    num_pieces /= static_cast<std::size_t>(cut_sizes[level]);
    first += static_cast<std::size_t>(coords[level]) * num_pieces;
  }
  return {.begin = cuts[first], .end = cuts[first + num_pieces]};
}

std::vector<std::int64_t> GroupPacking::counts(std::span<const int> coords) const {
  HS_CHECK(
      coords.size() < cut_sizes.size(),
      "layout.packing: no level is left below coordinates ",
      coords,
      ": the buffer is cut ",
      cut_sizes.size(),
      " times: ",
      cut_sizes,
      HS_HINT("leave out the coordinate of the level that you want the counts of")
  );
  std::vector<int> child(coords.begin(), coords.end());
  std::vector<std::int64_t> counts;
  child.push_back(0);
  for (; child.back() < cut_sizes[coords.size()]; ++child.back()) {
    counts.push_back(range(child).numel());
  }
  return counts;
}

GroupPacking pack_group(std::span<const PackRequest> requests, const PackOptions& options) {
  HS_CHECK(
      options.alignment >= 1 && options.alignment <= kMaxNumel,
      "layout.packing: alignment ",
      options.alignment,
      " (expected 1 to ",
      kMaxNumel,
      " elements)"
  );
  const std::int64_t num_pieces = num_pieces_of(options.cut_sizes);
  GroupPacking packing;
  packing.cut_sizes = options.cut_sizes;
  packing.alignment = options.alignment;
  place_segments(requests, options.alignment, packing);
  if (internal::may_cut_anywhere(packing)) {
    cut_evenly(num_pieces, options.alignment, packing);
  } else {
    packing.cuts = balanced_cuts(internal::cut_runs(packing), num_pieces);
  }
  return packing;
}

}  // namespace hypershard::layout
