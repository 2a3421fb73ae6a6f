// Why: two blocks of staging that overlap would corrupt a tensor once in a while: random takes and
// releases are checked against the blocks that are out.
#include "hypershard/comm/shm/internal/staging_ring.h"

#include <deque>
#include <random>

#include <gtest/gtest.h>

namespace hypershard::comm::internal {
namespace {

TEST(StagingRingTest, BlocksNeverOverlapAndAreReused) {
  constexpr std::int64_t kCapacity = 4096;
  StagingRing ring(kCapacity);
  std::mt19937 random(3);
  struct Block {
    std::uint64_t step;
    std::int64_t begin, end;
  };
  std::deque<Block> out;
  std::uint64_t step = 0;
  int num_refused = 0;
  for (int round = 0; round < 20'000; ++round) {
    const std::int64_t bytes = 1 + random() % 1500;
    if (const auto begin = ring.take(step, bytes)) {
      const Block block{step++, *begin, *begin + bytes};
      ASSERT_GE(block.begin, 0);
      ASSERT_LE(block.end, kCapacity);
      for (const Block& other : out) {
        ASSERT_TRUE(block.end <= other.begin || other.end <= block.begin) << "round " << round;
      }
      out.push_back(block);
    } else {
      ++num_refused;
      ASSERT_FALSE(out.empty()) << "an empty ring must take " << bytes << " bytes";
      out.pop_front();
      ring.release_before(out.empty() ? step : out.front().step);
    }
    ASSERT_EQ(ring.num_blocks(), out.size());
  }
  EXPECT_GT(num_refused, 1000);
}

TEST(StagingRingTest, TakesTheWholeCapacityOnlyWhenEmpty) {
  StagingRing ring(1024);
  EXPECT_TRUE(ring.take(0, 1024).has_value());
  EXPECT_FALSE(ring.take(1, 1).has_value());
  ring.release_before(1);
  EXPECT_FALSE(ring.take(1, 1025).has_value());
  EXPECT_TRUE(ring.take(1, 64).has_value());
}

}  // namespace
}  // namespace hypershard::comm::internal
