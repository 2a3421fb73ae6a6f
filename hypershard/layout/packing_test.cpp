// Tests packings: written-out ones, and the promises of the header over many shapes, atoms and
// cuts. Balance is compared with a search over all cuts where that is small enough.
#include "hypershard/layout/packing.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>

#include <gtest/gtest.h>

#include "hypershard/layout/thrown_text.h"

namespace hypershard::layout {
namespace {

using Coords = std::vector<int>;
using Counts = std::vector<std::int64_t>;

std::int64_t numel_of(const std::vector<std::int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

std::vector<PackRequest> equal_matrices(int num, std::int64_t numel) {
  std::vector<PackRequest> requests;
  for (int i = 0; i < num; ++i) {
    requests.push_back({"w" + std::to_string(i), {numel}, numel});
  }
  return requests;
}

std::vector<std::int64_t> piece_sizes(const GroupPacking& packing) {
  std::vector<std::int64_t> sizes;
  for (std::size_t i = 1; i < packing.cuts.size(); ++i) {
    sizes.push_back(packing.cuts[i] - packing.cuts[i - 1]);
  }
  return sizes;
}

// ---- written out -------------------------------------------------------------------------------

TEST(PackingTest, PacksInOrderAtAlignedOffsets) {
  const std::vector<PackRequest> requests = {{"a", {3, 5}}, {"b", {}}, {"c", {0, 4}}, {"d", {17}}};
  const GroupPacking packing = pack_group(requests, {.cut_sizes = {2}, .alignment = 16});
  ASSERT_EQ(packing.segments.size(), 4U);
  EXPECT_EQ(packing.segments[0].offset, 0);
  EXPECT_EQ(packing.segments[1].offset, 16);
  EXPECT_EQ(packing.segments[2].offset, 32);
  EXPECT_EQ(packing.segments[3].offset, 32);
  EXPECT_EQ(packing.segments[0].numel, 15);
  EXPECT_EQ(packing.segments[1].numel, 1);
  EXPECT_EQ(packing.segments[2].numel, 0);
  EXPECT_EQ(packing.segments[3].numel, 17);
  EXPECT_EQ(packing.segments[0].name, "a");
  EXPECT_EQ(packing.segments[0].shape, (std::vector<std::int64_t>{3, 5}));
  EXPECT_EQ(packing.used_numel, 33);
  EXPECT_EQ(packing.numel, 64);
  EXPECT_EQ(packing.padding_numel(), 31);
  EXPECT_EQ(packing.cuts, (Counts{0, 32, 64}));
}

TEST(PackingTest, EvenCutsPadTheEndToEqualPieces) {
  const std::vector<PackRequest> requests = {{"a", {10}}};
  const GroupPacking packing = pack_group(requests, {.cut_sizes = {3}, .alignment = 1});
  EXPECT_EQ(packing.cuts, (Counts{0, 4, 8, 12}));
  EXPECT_EQ(packing.numel, 12);
  EXPECT_EQ(packing.used_numel, 10);
  EXPECT_DOUBLE_EQ(packing.imbalance(), 1.0);
}

TEST(PackingTest, MoreRanksThanElementsLeaveTheLastOnesPadding) {
  const std::vector<PackRequest> requests = {{"a", {2}}, {"b", {}}};
  const GroupPacking packing = pack_group(requests, {.cut_sizes = {8}, .alignment = 1});
  EXPECT_EQ(packing.cuts, (Counts{0, 1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(packing.used_numel, 3);
}

TEST(PackingTest, EmptyGroupsHaveEmptyPieces) {
  const std::vector<PackRequest> nothing;
  const std::vector<PackRequest> zero = {{"z", {0}}, {"y", {3, 0}, 1}, {"x", {7, 0}, 32}};
  for (const std::vector<PackRequest>& requests : {nothing, zero}) {
    const GroupPacking packing = pack_group(requests, {.cut_sizes = {2, 3}});
    EXPECT_EQ(packing.numel, 0);
    EXPECT_EQ(packing.cuts, Counts(7, 0));
    EXPECT_DOUBLE_EQ(packing.imbalance(), 1.0);
    EXPECT_EQ(packing.range(Coords{1, 2}), (Range{0, 0}));
    EXPECT_EQ(packing.counts(Coords{}), (Counts{0, 0}));
  }
}

TEST(PackingTest, EmptyParametersDoNotMakeTheCutsUneven) {
  const std::vector<PackRequest> requests = {{"a", {10}}, {"z", {0, 32}, 32}};
  EXPECT_EQ(pack_group(requests, {.cut_sizes = {2}, .alignment = 1}).cuts, (Counts{0, 5, 10}));
}

TEST(PackingTest, NestedRangesAndCounts) {
  const std::vector<PackRequest> requests = {{"a", {24}}};
  const GroupPacking packing = pack_group(requests, {.cut_sizes = {2, 3}, .alignment = 4});
  EXPECT_EQ(packing.range(Coords{}), (Range{0, 24}));
  EXPECT_EQ(packing.range(Coords{0}), (Range{0, 12}));
  EXPECT_EQ(packing.range(Coords{1}), (Range{12, 24}));
  EXPECT_EQ(packing.range(Coords{1, 2}), (Range{20, 24}));
  EXPECT_EQ(packing.counts(Coords{}), (Counts{12, 12}));
  EXPECT_EQ(packing.counts(Coords{1}), (Counts{4, 4, 4}));
}

TEST(PackingTest, NoCutMakesOnePiece) {
  const std::vector<PackRequest> requests = {{"a", {5}}, {"b", {7}, 7}};
  const GroupPacking packing = pack_group(requests, {.cut_sizes = {}, .alignment = 4});
  EXPECT_EQ(packing.cuts, (Counts{0, 16}));
  EXPECT_EQ(packing.range(Coords{}), (Range{0, 16}));
}

TEST(PackingTest, WholeMatricesAreNeverCut) {
  // 6 and 2 and 4 of 4 elements: the best two pieces are {6} | {2, 4} of 24 and 24.
  const std::vector<PackRequest> requests = {
      {"a", {6, 4}, 24}, {"b", {2, 4}, 8}, {"c", {4, 4}, 16}
  };
  const GroupPacking packing = pack_group(requests, {.cut_sizes = {2}, .alignment = 8});
  EXPECT_EQ(packing.cuts, (Counts{0, 24, 48}));
  EXPECT_DOUBLE_EQ(packing.imbalance(), 1.0);
}

TEST(PackingTest, CutsFallBetweenRows) {
  const std::vector<PackRequest> requests = {{"w", {5, 6}, 6}};
  const GroupPacking packing = pack_group(requests, {.cut_sizes = {2}, .alignment = 1});
  EXPECT_EQ(packing.cuts, (Counts{0, 12, 30}));
  EXPECT_DOUBLE_EQ(packing.imbalance(), 18.0 / 15.0);
}

TEST(PackingTest, PaddingBehindAMatrixGoesWithIt) {
  const std::vector<PackRequest> requests = equal_matrices(2, 10);
  const GroupPacking packing = pack_group(requests, {.cut_sizes = {2}, .alignment = 16});
  EXPECT_EQ(packing.cuts, (Counts{0, 16, 32}));
}

TEST(PackingTest, FreelyCutParametersBesideAtomsAreCutAtTheAlignment) {
  const std::vector<PackRequest> requests = {{"w", {4, 4}, 16}, {"v", {64}}};
  const GroupPacking packing = pack_group(requests, {.cut_sizes = {2}, .alignment = 16});
  EXPECT_EQ(packing.cuts, (Counts{0, 32, 80}));
}

TEST(PackingTest, MoreRanksThanMatricesSpreadThem) {
  const GroupPacking packing = pack_group(equal_matrices(3, 16), {.cut_sizes = {8}});
  std::vector<std::int64_t> sizes = piece_sizes(packing);
  EXPECT_EQ(std::count(sizes.begin(), sizes.end(), 16), 3);
  EXPECT_EQ(std::count(sizes.begin(), sizes.end(), 0), 5);
}

TEST(PackingTest, EqualMatricesDifferByOneAtMost) {
  for (int num = 1; num <= 40; ++num) {
    for (int ranks = 1; ranks <= 17; ++ranks) {
      const GroupPacking packing = pack_group(equal_matrices(num, 48), {.cut_sizes = {ranks}});
      const std::vector<std::int64_t> sizes = piece_sizes(packing);
      EXPECT_EQ(*std::max_element(sizes.begin(), sizes.end()), (num + ranks - 1) / ranks * 48);
      EXPECT_EQ(*std::min_element(sizes.begin(), sizes.end()), num / ranks * 48);
    }
  }
}

TEST(PackingTest, OuterPiecesOfEqualMatricesBalanceToo) {
  for (int num = 1; num <= 40; ++num) {
    const GroupPacking packing = pack_group(equal_matrices(num, 16), {.cut_sizes = {2, 4}});
    const Counts halves = packing.counts(Coords{});
    EXPECT_LE(std::abs(halves[0] - halves[1]), 16) << num << " matrices";
  }
}

TEST(PackingTest, ATransformerBlockOfWholeMatricesIsCutAtItsBestPlaces) {
  // q, k, v, o of d*d and gate, up, down of d*4d, in units of d*d: 4 4 4 after 1 1 1 1.
  const std::int64_t unit = 64 * 64;
  std::vector<PackRequest> requests;
  for (const char* name : {"q", "k", "v", "o"}) {
    requests.push_back({name, {64, 64}, unit});
  }
  for (const char* name : {"gate", "up", "down"}) {
    requests.push_back({name, {64, 256}, 4 * unit});
  }
  EXPECT_EQ(pack_group(requests, {.cut_sizes = {2}}).cuts, (Counts{0, 8 * unit, 16 * unit}));
  EXPECT_DOUBLE_EQ(pack_group(requests, {.cut_sizes = {4}}).imbalance(), 1.0);
  EXPECT_DOUBLE_EQ(pack_group(requests, {.cut_sizes = {8}}).imbalance(), 2.0);
}

TEST(PackingTest, HandlesAHundredThousandRanks) {
  std::vector<PackRequest> requests;
  for (int layer = 0; layer < 100; ++layer) {
    requests.push_back({"w" + std::to_string(layer), {8'192, 28'672}, 28'672});
    requests.push_back({"b" + std::to_string(layer), {28'672}, 1});
  }
  const PackOptions options = {.cut_sizes = {8, 12'500}};
  const GroupPacking by_row = pack_group(requests, options);
  EXPECT_EQ(by_row.cuts.size(), 100'001U);
  EXPECT_EQ(by_row.cuts.back(), by_row.numel);
  EXPECT_LT(by_row.imbalance(), 1.0 + 2.0 * 28'672 * 100'000 / static_cast<double>(by_row.numel));
  EXPECT_EQ(by_row.counts(Coords{7}).size(), 12'500U);

  for (PackRequest& request : requests) {
    request.atom_numel = 1;
  }
  const GroupPacking by_element = pack_group(requests, options);
  EXPECT_DOUBLE_EQ(by_element.imbalance(), 1.0);
  EXPECT_EQ(by_element.range(Coords{7, 12'499}).end, by_element.numel);

  for (PackRequest& request : requests) {
    request.atom_numel = numel_of(request.shape);
  }
  const GroupPacking whole = pack_group(requests, options);
  const std::vector<std::int64_t> sizes = piece_sizes(whole);
  EXPECT_EQ(*std::max_element(sizes.begin(), sizes.end()), 8'192LL * 28'672);
}

// ---- the promises, over many cases -------------------------------------------------------------

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

// ---- ranges and errors -------------------------------------------------------------------------

TEST(RangeTest, IntersectionIsTheCommonPart) {
  EXPECT_EQ(intersect({0, 10}, {5, 15}), (Range{5, 10}));
  EXPECT_EQ(intersect({5, 15}, {0, 10}), (Range{5, 10}));
  EXPECT_EQ(intersect({0, 10}, {2, 4}), (Range{2, 4}));
  EXPECT_EQ(intersect({0, 4}, {4, 8}).numel(), 0);
  const Range apart = intersect({0, 3}, {7, 9});
  EXPECT_EQ(apart.begin, apart.end);
  EXPECT_EQ(intersect({9, 12}, {1, 2}).numel(), 0);
  EXPECT_EQ(intersect({3, 3}, {0, 9}).numel(), 0);
}

TEST(PackingErrorTest, NamesTheParameterAndItsValues) {
  const auto pack = [](PackRequest request) {
    return pack_group(std::vector<PackRequest>{{"fine", {2}}, std::move(request)}, {});
  };
  HS_EXPECT_INVALID(pack({"blocks.3.w", {4, -1}}), "'blocks.3.w'", "negative dimension", "[4, -1]");
  HS_EXPECT_INVALID(pack({"blocks.3.w", {0, -1}}), "negative dimension");
  HS_EXPECT_INVALID(pack({"w", {3, 5}, 4}), "'w' of 15 elements", "[3, 5]", "atoms of 4");
  HS_EXPECT_INVALID(pack({"w", {3, 5}, 0}), "atoms of 0");
  HS_EXPECT_INVALID(pack({"w", {3, 5}, -5}), "atoms of -5");
  HS_EXPECT_INVALID(pack({"w", {}, 2}), "'w' of 1 elements", "atoms of 2");
  HS_EXPECT_INVALID(pack({"w", {1LL << 40, 1LL << 40}}), "'w' has too many elements");
  EXPECT_EQ(pack({"w", {1LL << 40, 1LL << 40, 0}}).used_numel, 2);
}

TEST(PackingErrorTest, RejectsImpossibleOptions) {
  const std::vector<PackRequest> requests = {{"w", {4}}};
  HS_EXPECT_INVALID(pack_group(requests, {.cut_sizes = {2, 0}}), "cut sizes [2, 0] contain 0");
  HS_EXPECT_INVALID(pack_group(requests, {.cut_sizes = {-1}}), "contain -1");
  HS_EXPECT_INVALID(pack_group(requests, {.cut_sizes = {100'000, 100'000}}), "too many pieces");
  HS_EXPECT_INVALID(pack_group(requests, {.alignment = 0}), "alignment 0");
  HS_EXPECT_INVALID(
      pack_group(requests, {.cut_sizes = {4}, .alignment = 1LL << 60}), "4 pieces", "lower it"
  );
  const std::vector<PackRequest> huge = {{"a", {1LL << 60}}, {"b", {1}}};
  HS_EXPECT_INVALID(pack_group(huge, {}), "group has too many elements", "'b'");
}

TEST(PackingErrorTest, RejectsCoordinatesOutOfRange) {
  const std::vector<PackRequest> requests = {{"w", {24}}};
  const GroupPacking packing = pack_group(requests, {.cut_sizes = {2, 3}});
  HS_EXPECT_INVALID(packing.range(Coords{2}), "coordinate 2 of level 0", "[2, 3]");
  HS_EXPECT_INVALID(packing.range(Coords{1, -1}), "coordinate -1 of level 1");
  HS_EXPECT_INVALID(packing.range(Coords{0, 0, 0}), "3 coordinates [0, 0, 0]", "cut 2 times");
  HS_EXPECT_INVALID(packing.counts(Coords{0, 3}), "no level is left");
  HS_EXPECT_INVALID(packing.counts(Coords{5}), "coordinate 5 of level 0");
  HS_EXPECT_INVALID(GroupPacking{}.range(Coords{}), "0 cuts", "pack_group");
}

}  // namespace
}  // namespace hypershard::layout
