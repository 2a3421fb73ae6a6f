// Tests packings whose right answer can be written down, and the error texts.
// packing_promises_test.cpp checks the header's promises over many random cases.
#include "hypershard/layout/packing.h"

#include <algorithm>
#include <numeric>

#include <gtest/gtest.h>

#include "hypershard/layout/mesh.h"
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

TEST(PackingTest, PiecesAreInTheOrderOfTheMeshGroup) {
  const std::vector<PackRequest> requests = {{"a", {48}}};
  const GroupPacking packing = pack_group(requests, {.cut_sizes = {3, 2}, .alignment = 1});
  const DeviceMesh mesh(
      {{"replicate", 2}, {"tp", 2}, {"shard", 3}}, Topology::single_supernode(12)
  );
  const std::vector<std::string> cut_axes = {"shard", "replicate"};
  for (int rank = 0; rank < mesh.size(); ++rank) {
    const std::vector<int> group = mesh.group(cut_axes, rank);
    const auto piece =
        static_cast<std::size_t>(std::find(group.begin(), group.end(), rank) - group.begin());
    const Coords coords = {mesh.coordinate(rank, "shard"), mesh.coordinate(rank, "replicate")};
    EXPECT_EQ(packing.range(coords), (Range{packing.cuts[piece], packing.cuts[piece + 1]}));
  }
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

TEST(PackingTest, ACutWithRoomToMoveIsTheNearestToTheEvenOne) {
  // The matrix of 50 sets the largest piece; the even cut at 40 lies between rows ending at 28, 42.
  const std::vector<PackRequest> requests = {{"rows", {5, 14}, 14}, {"matrix", {50}, 50}};
  const GroupPacking packing = pack_group(requests, {.cut_sizes = {3}, .alignment = 1});
  EXPECT_EQ(packing.cuts, (Counts{0, 42, 70, 120}));
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
