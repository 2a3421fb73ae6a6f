// Tests the promises of packing.h over many random shapes, atoms, cuts and alignments.
// Balance is compared with a search over all cuts that the header allows.
#include <algorithm>
#include <limits>
#include <numeric>
#include <random>

#include <gtest/gtest.h>

#include "hypershard/core/text.h"
#include "hypershard/layout/packing.h"

namespace hypershard::layout {
namespace {

using Coords = std::vector<int>;
using Counts = std::vector<std::int64_t>;

std::int64_t numel_of(const std::vector<std::int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

std::vector<std::int64_t> piece_sizes(const GroupPacking& packing) {
  std::vector<std::int64_t> sizes;
  for (std::size_t i = 1; i < packing.cuts.size(); ++i) {
    sizes.push_back(packing.cuts[i] - packing.cuts[i - 1]);
  }
  return sizes;
}

struct Case {
  std::vector<PackRequest> requests;
  PackOptions options;
};

// std::mt19937's own sequence is the same everywhere; the distributions of <random> are not.
class CaseMaker {
 public:
  explicit CaseMaker(unsigned seed) : engine_(seed) {}

  std::int64_t below(std::int64_t bound) {
    return static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(bound));
  }

  Case make(bool free_atoms_only) {
    static const std::vector<std::vector<int>> kCuts = {
        {}, {1}, {2}, {3}, {7}, {64}, {2, 3}, {4, 1}, {1, 5}, {3, 2, 2}, {1, 1}
    };
    static const std::vector<std::int64_t> kAlignments = {1, 2, 3, 16, 64};
    Case made;
    made.options.cut_sizes = kCuts[static_cast<std::size_t>(below(std::ssize(kCuts)))];
    made.options.alignment = kAlignments[static_cast<std::size_t>(below(std::ssize(kAlignments)))];
    const std::int64_t num_requests = below(7);
    for (std::int64_t i = 0; i < num_requests; ++i) {
      made.requests.push_back(request("p" + std::to_string(i), free_atoms_only));
    }
    return made;
  }

 private:
  PackRequest request(std::string name, bool free_atoms_only) {
    PackRequest made;
    made.name = std::move(name);
    const std::int64_t num_dims = below(4);
    for (std::int64_t dim = 0; dim < num_dims; ++dim) {
      made.shape.push_back(below(12) == 0 ? 0 : 1 + below(9));
    }
    const std::int64_t numel = numel_of(made.shape);
    if (!free_atoms_only && numel > 0) {
      const std::int64_t row = made.shape.empty() ? 1 : numel / made.shape[0];
      const std::int64_t choices[] = {1, row, numel, numel % 8 == 0 ? 8 : numel};
      made.atom_numel = choices[below(4)];
    }
    return made;
  }

  std::mt19937 engine_;
};

std::string describe(const Case& tested, const GroupPacking& packing) {
  std::string text = concat_text(
      "cut sizes ",
      tested.options.cut_sizes,
      ", alignment ",
      tested.options.alignment,
      ", cuts ",
      packing.cuts
  );
  for (const PackRequest& request : tested.requests) {
    text += concat_text(", ", request.shape, "/", request.atom_numel);
  }
  return text;
}

/// The smallest possible largest piece, by trying all cuts that the header allows.
std::int64_t best_largest_piece(const Case& tested, const GroupPacking& packing) {
  std::vector<std::int64_t> places;
  for (std::size_t i = 0; i < tested.requests.size(); ++i) {
    const std::int64_t atom = tested.requests[i].atom_numel;
    const Segment& segment = packing.segments[i];
    for (std::int64_t at = 0; at < segment.numel;
         at += atom == 1 ? tested.options.alignment : atom) {
      places.push_back(segment.offset + at);
    }
  }
  places.push_back(packing.numel);
  constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();
  std::vector<std::int64_t> best(places.size(), kNone);  // up to places[i], with the pieces so far
  best[0] = 0;
  for (std::size_t piece = 1; piece < packing.cuts.size(); ++piece) {
    std::vector<std::int64_t> next(places.size(), kNone);
    for (std::size_t end = 0; end < places.size(); ++end) {
      for (std::size_t begin = 0; begin <= end; ++begin) {
        if (best[begin] != kNone) {
          next[end] = std::min(next[end], std::max(best[begin], places[end] - places[begin]));
        }
      }
    }
    best = next;
  }
  return best.back();
}

void expect_segments_in_order(const Case& tested, const GroupPacking& packing) {
  ASSERT_EQ(packing.segments.size(), tested.requests.size());
  std::int64_t position = 0;
  std::int64_t used = 0;
  for (std::size_t i = 0; i < tested.requests.size(); ++i) {
    const Segment& segment = packing.segments[i];
    ASSERT_EQ(segment.name, tested.requests[i].name);
    ASSERT_EQ(segment.shape, tested.requests[i].shape);
    ASSERT_EQ(segment.numel, numel_of(segment.shape));
    ASSERT_EQ(segment.offset % tested.options.alignment, 0);
    ASSERT_GE(segment.offset, position);
    ASSERT_LT(segment.offset - position, tested.options.alignment);
    position = segment.offset + segment.numel;
    used += segment.numel;
  }
  ASSERT_LE(position, packing.numel);
  ASSERT_EQ(packing.used_numel, used);
  ASSERT_EQ(packing.padding_numel(), packing.numel - used);
}

void expect_cuts_between_atoms(const Case& tested, const GroupPacking& packing) {
  int num_pieces = 1;
  for (const int size : tested.options.cut_sizes) {
    num_pieces *= size;
  }
  ASSERT_EQ(static_cast<int>(packing.cuts.size()), num_pieces + 1);
  ASSERT_EQ(packing.cuts.front(), 0);
  ASSERT_EQ(packing.cuts.back(), packing.numel);
  ASSERT_TRUE(std::is_sorted(packing.cuts.begin(), packing.cuts.end()));
  for (const std::int64_t cut : packing.cuts) {
    for (std::size_t i = 0; i < packing.segments.size(); ++i) {
      const Segment& segment = packing.segments[i];
      if (cut > segment.offset && cut < segment.offset + segment.numel) {
        ASSERT_EQ((cut - segment.offset) % tested.requests[i].atom_numel, 0);
      }
    }
  }
}

void expect_every_element_in_one_piece(const GroupPacking& packing) {
  std::vector<int> num_owners(static_cast<std::size_t>(packing.numel), 0);
  for (std::size_t piece = 1; piece < packing.cuts.size(); ++piece) {
    for (std::int64_t i = packing.cuts[piece - 1]; i < packing.cuts[piece]; ++i) {
      ++num_owners[static_cast<std::size_t>(i)];
    }
  }
  ASSERT_EQ(std::count(num_owners.begin(), num_owners.end(), 1), packing.numel);
  for (const Segment& segment : packing.segments) {
    std::int64_t covered = 0;
    for (std::size_t piece = 1; piece < packing.cuts.size(); ++piece) {
      covered += intersect(
                     {packing.cuts[piece - 1], packing.cuts[piece]},
                     {segment.offset, segment.offset + segment.numel}
      )
                     .numel();
    }
    ASSERT_EQ(covered, segment.numel);
  }
}

/// Counts the leaves below `coords` while checking that children tile their parent.
void expect_ranges_nest(const GroupPacking& packing, const Coords& coords, std::size_t& leaf) {
  const Range range = packing.range(coords);
  if (coords.size() == packing.cut_sizes.size()) {
    ASSERT_EQ(range, (Range{packing.cuts[leaf], packing.cuts[leaf + 1]}));
    ++leaf;
    return;
  }
  const Counts counts = packing.counts(coords);
  ASSERT_EQ(static_cast<int>(counts.size()), packing.cut_sizes[coords.size()]);
  std::int64_t position = range.begin;
  for (int i = 0; i < static_cast<int>(counts.size()); ++i) {
    Coords child = coords;
    child.push_back(i);
    ASSERT_EQ(packing.range(child).begin, position);
    ASSERT_EQ(packing.range(child).numel(), counts[static_cast<std::size_t>(i)]);
    position = packing.range(child).end;
    expect_ranges_nest(packing, child, leaf);
  }
  ASSERT_EQ(position, range.end);
}

void expect_promises_kept(const Case& tested, const GroupPacking& packing) {
  expect_segments_in_order(tested, packing);
  expect_cuts_between_atoms(tested, packing);
  expect_every_element_in_one_piece(packing);
  std::size_t num_leaves = 0;
  expect_ranges_nest(packing, {}, num_leaves);
  ASSERT_EQ(num_leaves + 1, packing.cuts.size());
}

class PackingPromisesTest : public testing::TestWithParam<unsigned> {};

TEST_P(PackingPromisesTest, HoldWithAtoms) {
  CaseMaker maker(GetParam());
  for (int i = 0; i < 200; ++i) {
    const Case tested = maker.make(/*free_atoms_only=*/false);
    const GroupPacking packing = pack_group(tested.requests, tested.options);
    SCOPED_TRACE(describe(tested, packing));
    expect_promises_kept(tested, packing);
    if (HasFatalFailure()) {
      return;
    }
    EXPECT_EQ(pack_group(tested.requests, tested.options).cuts, packing.cuts);
  }
}

TEST_P(PackingPromisesTest, HoldForEvenCuts) {
  CaseMaker maker(GetParam() + 1'000);
  for (int i = 0; i < 200; ++i) {
    const Case tested = maker.make(/*free_atoms_only=*/true);
    const GroupPacking packing = pack_group(tested.requests, tested.options);
    SCOPED_TRACE(describe(tested, packing));
    expect_promises_kept(tested, packing);
    if (HasFatalFailure()) {
      return;
    }
    const std::int64_t piece = packing.cuts[1];
    const std::int64_t num_pieces = std::ssize(packing.cuts) - 1;
    EXPECT_EQ(piece % tested.options.alignment, 0);
    EXPECT_EQ(packing.cuts.back(), piece * num_pieces);
    EXPECT_DOUBLE_EQ(packing.imbalance(), 1.0);
    const std::int64_t needed =
        packing.segments.empty() ? 0
                                 : packing.segments.back().offset + packing.segments.back().numel;
    EXPECT_LT(packing.numel - needed, num_pieces * tested.options.alignment) << "needless padding";
  }
}

TEST_P(PackingPromisesTest, LargestPieceIsTheSmallestPossible) {
  CaseMaker maker(GetParam() + 2'000);
  for (int i = 0; i < 60; ++i) {
    const Case tested = maker.make(/*free_atoms_only=*/false);
    const GroupPacking packing = pack_group(tested.requests, tested.options);
    const bool is_uneven =
        std::any_of(tested.requests.begin(), tested.requests.end(), [](const PackRequest& request) {
          return request.atom_numel > 1;
        });
    if (!is_uneven) {
      continue;
    }
    SCOPED_TRACE(describe(tested, packing));
    const std::vector<std::int64_t> sizes = piece_sizes(packing);
    const std::int64_t largest = *std::max_element(sizes.begin(), sizes.end());
    EXPECT_EQ(largest, best_largest_piece(tested, packing));
    EXPECT_DOUBLE_EQ(
        packing.imbalance(),
        static_cast<double>(largest * std::ssize(sizes)) / static_cast<double>(packing.numel)
    );
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, PackingPromisesTest, testing::Range(1U, 11U));

}  // namespace
}  // namespace hypershard::layout
