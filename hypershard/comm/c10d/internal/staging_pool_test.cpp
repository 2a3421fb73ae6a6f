// Lending, reuse and the bound of the staging pool.
#include "hypershard/comm/c10d/internal/staging_pool.h"

#include <memory>
#include <utility>

#include <gtest/gtest.h>

namespace hypershard::comm::internal {
namespace {

TEST(StagingPoolTest, LendsWhatCameBack) {
  const auto pool = std::make_shared<StagingPool>();
  std::byte* first = nullptr;
  {
    const StagingPool::Lease lease = pool->lend(100'000);
    EXPECT_GE(lease.tensor().numel(), 100'000);
    first = lease.data();
  }
  const StagingPool::Lease again = pool->lend(99'000);
  EXPECT_EQ(again.data(), first);
  EXPECT_EQ(pool->num_made(), 1);
}

TEST(StagingPoolTest, LendsTwoBuffersAtOnce) {
  const auto pool = std::make_shared<StagingPool>();
  const StagingPool::Lease a = pool->lend(5000);
  const StagingPool::Lease b = pool->lend(5000);
  EXPECT_NE(a.data(), b.data());
  EXPECT_EQ(pool->num_made(), 2);
}

TEST(StagingPoolTest, DoesNotWasteALargeBufferOnASmallLoan) {
  const auto pool = std::make_shared<StagingPool>();
  { const StagingPool::Lease large = pool->lend(1 << 20); }
  const StagingPool::Lease small = pool->lend(1000);
  EXPECT_LT(small.tensor().numel(), 1 << 20);
}

TEST(StagingPoolTest, KeepsLessThanTwiceThePeak) {
  const auto pool = std::make_shared<StagingPool>();
  for (std::int64_t size = 1 << 14; size <= 1 << 20; size *= 4) {
    const StagingPool::Lease lease = pool->lend(size);
  }
  EXPECT_GT(pool->free_bytes(), 0);
  EXPECT_LE(pool->free_bytes(), 2 << 20);
}

TEST(StagingPoolTest, LendsNothingForNothing) {
  const auto pool = std::make_shared<StagingPool>();
  EXPECT_EQ(pool->lend(0).data(), nullptr);
  EXPECT_EQ(pool->num_made(), 0);
}

TEST(StagingPoolTest, AMovedLeaseComesBackOnce) {
  const auto pool = std::make_shared<StagingPool>();
  {
    StagingPool::Lease lease = pool->lend(5000);
    const StagingPool::Lease other = std::move(lease);
    lease = pool->lend(5000);
  }
  EXPECT_EQ(pool->num_made(), 2);
  const StagingPool::Lease a = pool->lend(5000);
  const StagingPool::Lease b = pool->lend(5000);
  EXPECT_EQ(pool->num_made(), 2);
}

}  // namespace
}  // namespace hypershard::comm::internal
