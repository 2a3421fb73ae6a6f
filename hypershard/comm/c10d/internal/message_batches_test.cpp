// Why: two ranks that cut a slice differently would wait for each other for ever, and messages have
// few numbers: sizes, order and number of the cuts are checked over many random slices.
#include "hypershard/comm/c10d/internal/message_batches.h"

#include <numeric>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "hypershard/comm/c10d/internal/message_engine.h"

namespace hypershard::comm::internal {
namespace {

using Counts = std::vector<std::int64_t>;

/// Returns the bytes of every batch.
Counts sizes(const Counts& counts, std::int64_t element_bytes = 4) {
  Counts bytes;
  for (const Batch& batch : cut_batches(counts, element_bytes)) {
    bytes.push_back(batch.count * element_bytes);
  }
  return bytes;
}

constexpr std::int64_t kMiB = 1 << 20;

TEST(CutBatchesTest, CutsALargeSliceInPieces) {
  EXPECT_EQ(sizes({kMiB / 4}), (Counts{kMiB}));
  EXPECT_EQ(sizes({kMiB / 2 + 1}), (Counts{kMiB, kMiB, 4}));
  EXPECT_EQ(sizes({3}), (Counts{12}));
  EXPECT_EQ(sizes({0}), Counts{});
  EXPECT_EQ(sizes({}), Counts{});
}

TEST(CutBatchesTest, JoinsSmallNeighbours) {
  const std::vector<Batch> batches = cut_batches(Counts{3, 0, 4, kMiB / 4, 5, 6}, 4);
  ASSERT_EQ(batches.size(), 3U);
  ASSERT_EQ(batches[0].parts.size(), 2U);
  EXPECT_EQ(batches[0].parts[1].segment, 2U);
  EXPECT_EQ(batches[0].count, 7);
  EXPECT_EQ(batches[1].parts.size(), 1U);
  EXPECT_EQ(batches[2].first, 7 + kMiB / 4);
  EXPECT_EQ(batches[2].count, 11);
}

TEST(CutBatchesTest, CoverEverySliceInOrderWithFewMessages) {
  std::mt19937 random(7);
  const auto below = [&](std::int64_t bound) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint32_t>(bound));
  };
  for (int round = 0; round < 2000; ++round) {
    Counts counts;
    const std::int64_t num_slices = 1 + below(round % 10 == 0 ? 3000 : 30);
    const std::int64_t largest = std::int64_t{1} << (1 + below(28));
    for (std::int64_t i = 0; i < num_slices; ++i) {
      counts.push_back(below(4) == 0 ? 0 : below(below(3) == 0 ? largest : 1 + largest / 100));
    }
    const std::int64_t element_bytes = std::int64_t{2} << below(3);
    std::int64_t position = 0;
    Counts covered(counts.size());
    const std::vector<Batch> batches = cut_batches(counts, element_bytes);
    ASSERT_LT(batches.size(), kMaxMessageIndex);
    for (const Batch& batch : batches) {
      ASSERT_EQ(batch.first, position);
      std::int64_t sum = 0;
      for (const BatchPart& part : batch.parts) {
        ASSERT_EQ(part.first, covered[part.segment]);
        ASSERT_GT(part.count, 0);
        covered[part.segment] += part.count;
        sum += part.count;
      }
      ASSERT_EQ(sum, batch.count);
      position += batch.count;
    }
    ASSERT_EQ(covered, counts);
  }
}

// Slices of just the size that is not joined, and slices that are, in turn.
TEST(CutBatchesTest, TheWorstCaseHasNumbersEnough) {
  for (const std::int64_t num_slices : {192, 193, 384, 400, 1000}) {
    Counts counts;
    for (std::int64_t i = 0; i < num_slices; ++i) {
      counts.push_back(i % 2 == 0 ? 65'536 : 65'535);
    }
    EXPECT_LT(cut_batches(counts, 4).size(), kMaxMessageIndex) << num_slices;
  }
}

}  // namespace
}  // namespace hypershard::comm::internal
