// Runs of elements that two parts of a tensor share, against a walk over all elements.
#include "hypershard/layout/block.h"

#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "hypershard/layout/thrown_text.h"

namespace hypershard::layout {
namespace {

// Global row-major index of each element of a block, in the block's order.
std::vector<std::int64_t> elements_of(const Block& block) {
  std::vector<std::int64_t> indices{0};
  for (std::size_t dim = 0; dim < block.ranges.size(); ++dim) {
    std::vector<std::int64_t> next;
    for (const std::int64_t index : indices) {
      for (std::int64_t at = block.ranges[dim].begin; at < block.ranges[dim].end; ++at) {
        next.push_back(index * block.shape[dim] + at);
      }
    }
    indices = next;
  }
  return indices;
}

void expect_runs(const Block& a, Range of_a, const Block& b, Range of_b) {
  SCOPED_TRACE(to_text(a) + " and " + to_text(b));
  const auto in_a = elements_of(a);
  const auto in_b = elements_of(b);
  std::map<std::int64_t, std::int64_t> second_of;
  for (std::int64_t i = of_b.begin; i < of_b.end; ++i) {
    second_of[in_b[static_cast<std::size_t>(i)]] = i;
  }
  std::map<std::int64_t, std::int64_t> expected;  // index in a -> index in b
  for (std::int64_t i = of_a.begin; i < of_a.end; ++i) {
    if (const auto found = second_of.find(in_a[static_cast<std::size_t>(i)]);
        found != second_of.end()) {
      expected[i] = found->second;
    }
  }
  std::map<std::int64_t, std::int64_t> found;
  std::int64_t last = -1;
  for (const BlockRun& run : common_runs(a, of_a, b, of_b)) {
    EXPECT_GT(run.numel, 0);
    EXPECT_GT(run.first, last);
    for (std::int64_t i = 0; i < run.numel; ++i) {
      found[run.first + i] = run.second + i;
    }
    last = run.first;
  }
  EXPECT_EQ(found, expected);
}

std::vector<Range> all_ranges(std::int64_t size) {
  std::vector<Range> ranges;
  for (std::int64_t begin = 0; begin < size; ++begin) {
    for (std::int64_t end = begin + 1; end <= size; ++end) {
      ranges.push_back({begin, end});
    }
  }
  return ranges;
}

TEST(BlockTest, RunsHoldExactlyTheCommonElements) {
  const std::vector<std::int64_t> shape{3, 2, 3};
  std::vector<Block> blocks;
  for (const Range& i : all_ranges(3)) {
    for (const Range& j : all_ranges(2)) {
      for (const Range& k : all_ranges(3)) {
        blocks.push_back({shape, {i, j, k}});
      }
    }
  }
  for (const Block& a : blocks) {
    for (const Block& b : blocks) {
      expect_runs(a, {0, a.numel()}, b, {0, b.numel()});
      expect_runs(a, {a.numel() / 3, a.numel()}, b, {0, (b.numel() + 1) / 2});
    }
  }
}

TEST(BlockTest, WholeTensorsAreOneRun) {
  const Block whole = whole_block({4, 5, 6});
  EXPECT_TRUE(whole.is_whole());
  const std::vector<BlockRun> expected{{10, 10, 20}};
  EXPECT_EQ(common_runs(whole, {10, 120}, whole, {0, 30}), expected);
  const Block rows{{4, 5, 6}, {{1, 3}, {0, 5}, {0, 6}}};
  const std::vector<BlockRun> shifted{{0, 30, 60}};
  EXPECT_EQ(common_runs(rows, {0, 60}, whole, {0, 120}), shifted);
  const Block columns{{4, 6}, {{0, 4}, {2, 4}}};
  const std::vector<BlockRun> strided{{1, 3, 1}, {2, 8, 2}, {4, 14, 1}};
  EXPECT_EQ(common_runs(columns, {1, 5}, whole_block({4, 6}), {0, 24}), strided);
  EXPECT_EQ(columns.local_shape(), (std::vector<std::int64_t>{4, 2}));
  EXPECT_EQ(to_text(columns), "[0:4,2:4]");
}

TEST(BlockTest, ScalarsAndEmptyTensors) {
  const Block scalar = whole_block({});
  EXPECT_EQ(scalar.numel(), 1);
  const std::vector<BlockRun> one{{0, 0, 1}};
  EXPECT_EQ(common_runs(scalar, {0, 1}, scalar, {0, 1}), one);
  const Block none = whole_block({0, 3});
  EXPECT_TRUE(common_runs(none, {0, 0}, none, {0, 0}).empty());
  EXPECT_TRUE(common_runs(scalar, {0, 0}, scalar, {0, 1}).empty());
}

TEST(BlockTest, RefusesPartsOfDifferentTensors) {
  const std::string text =
      thrown_text([] { common_runs(whole_block({2}), {0, 2}, whole_block({3}), {0, 3}); });
  EXPECT_NE(text.find("[2] and [3]"), std::string::npos) << text;
}

TEST(BlockTest, LocalBlocksTileTheTensor) {
  const DeviceMesh mesh({{"tp", 2}, {"ep", 3}}, Topology::single_supernode(6));
  const TensorSpec spec{{5, 4}, {{Placement::shard(1), Placement::shard(0)}}};
  std::vector<int> seen(20, 0);
  for (int rank = 0; rank < 6; ++rank) {
    for (const std::int64_t index : elements_of(local_block(spec, mesh, mesh.coordinates(rank)))) {
      ++seen[static_cast<std::size_t>(index)];
    }
  }
  EXPECT_EQ(seen, std::vector<int>(20, 1));
}

}  // namespace
}  // namespace hypershard::layout
