// Accumulation over two tiers: whatever is summed where, and when, comes out as the gradient of the
// whole batch, for every strategy, kind of unit and bucket.
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "hypershard/shard/test_two_tier.h"

namespace hypershard::shard::test {
namespace {

using layout::Strategy;
using testing::RankBackend;

constexpr double kNear = 1e-12;

/// After which micro-batches gradients are summed, and how far.
enum class Sync {
  kEvery,  ///< after each, over all ranks
  kLast,   ///< after the last only
  kInner,  ///< inside the supernode after each, between supernodes after the last
};

struct Accumulation {
  Sync sync = Sync::kEvery;
  int num_micro = 1;
  std::int64_t bucket_bytes = layout::kBucketOfOne;
};

std::string to_text(const Accumulation& how) {
  const char* names[] = {"every", "last", "inner"};
  return std::string("sync ") + names[static_cast<int>(how.sync)] + ", " +
         std::to_string(how.num_micro) + " micro-batches, buckets of " +
         std::to_string(how.bucket_bytes);
}

std::vector<Accumulation> all_accumulations() {
  std::vector<Accumulation> all;
  for (const std::int64_t bucket_bytes : kBucketSizes) {
    for (const Sync sync : {Sync::kEvery, Sync::kLast, Sync::kInner}) {
      for (const int num_micro : {1, 2, 4}) {
        all.push_back({sync, num_micro, bucket_bytes});
      }
    }
  }
  return all;
}

/// Backwards of all micro-batches, in two steps, so that what one leaves behind would show.
template <class Holder>
void expect_whole_batch(
    const std::shared_ptr<comm::World>& world,
    const comm::ProcessMesh& mesh,
    Strategy strategy,
    const Accumulation& how
) {
  Holder oracle;
  Holder model;
  const ShardedModel sharded = fully_shard(*model, mesh, tier_options(strategy, how.bucket_bytes));
  constexpr std::int64_t kRows = 16;
  for (int step = 0; step < 2; ++step) {
    sharded.zero_grad();
    const at::Tensor batch = make_inputs(kRows, 5, step);
    const auto expected =
        trainable_gradients([&] { return loss_of(oracle->forward(batch)); }, *oracle);
    const std::int64_t rows = kRows / how.num_micro;
    for (int micro = 0; micro < how.num_micro; ++micro) {
      const bool is_last = micro + 1 == how.num_micro;
      sharded.set_requires_gradient_sync(how.sync != Sync::kLast || is_last);
      sharded.set_requires_all_reduce(how.sync != Sync::kInner || is_last);
      const at::Tensor part =
          rows_of(batch.narrow(0, rows * micro, rows), world->rank(), world->size());
      (loss_of(model->forward(part)) / how.num_micro).backward();
    }
    EXPECT_LE(worst_gradient(sharded, expected), kNear)
        << to_text(strategy) << ", " << to_text(how) << ", step " << step;
  }
}

struct Case {
  Strategy strategy = Strategy::kHierarchical;
  Tiers tiers = {};
  RankBackend backend = RankBackend::kLocal;
};

std::string name_of(const ::testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  return to_text(c.strategy) + "_" + to_text(c.tiers) + "_" + testing::to_text(c.backend);
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const RankBackend backend : all_backends()) {
    for (const Strategy strategy : kAllStrategies) {
      for (const Tiers& tiers : {Tiers{2, 2}, Tiers{4, 2}}) {
        cases.push_back({strategy, tiers, backend});
      }
    }
  }
  return cases;
}

class TwoTierAccumulationTest : public ::testing::TestWithParam<Case> {
 protected:
  template <class Holder>
  void run() const {
    const Case& c = GetParam();
    testing::run_ranks(
        c.tiers.num_ranks,
        [&](const std::shared_ptr<comm::World>& world) {
          const comm::ProcessMesh mesh = make_mesh(world, c.tiers.num_supernodes);
          for (const Accumulation& how : all_accumulations()) {
            expect_whole_batch<Holder>(world, mesh, c.strategy, how);
          }
        },
        run_options(c.tiers, c.backend)
    );
  }
};

TEST_P(TwoTierAccumulationTest, EqualUnitsGetTheGradientOfTheWholeBatch) {
  run<Net>();
}

// Blocks of three sizes, a frozen one, one that runs twice, two that share a layer.
TEST_P(TwoTierAccumulationTest, OddUnitsGetTheGradientOfTheWholeBatch) {
  run<OddNet>();
}

INSTANTIATE_TEST_SUITE_P(All, TwoTierAccumulationTest, ::testing::ValuesIn(all_cases()), name_of);

// The sizes above mean what they say, or the tests would test one of them thrice.
TEST(BucketSizesTest, AreOfOneUnitOfSomeAndOfAll) {
  for (const Tiers& tiers : {Tiers{2, 2}, Tiers{4, 2}}) {
    testing::run_ranks(
        tiers.num_ranks,
        [&](const std::shared_ptr<comm::World>& world) {
          const auto count = [&](auto model, std::int64_t bucket_bytes) {
            const FullyShardOptions options = tier_options(Strategy::kHierarchical, bucket_bytes);
            return num_buckets(fully_shard(*model, make_mesh(world, tiers.num_supernodes), options)
            );
          };
          EXPECT_EQ(count(Net(), layout::kBucketOfOne), 4);
          EXPECT_EQ(count(OddNet(), layout::kBucketOfOne), 5);
          for (const int some : {count(Net(), kSomeUnits), count(OddNet(), kSomeUnits)}) {
            EXPECT_GT(some, 1) << to_text(tiers);
            EXPECT_LT(some, 4) << to_text(tiers);
          }
          EXPECT_EQ(count(Net(), layout::kBucketOfAll), 1);
          EXPECT_EQ(count(OddNet(), layout::kBucketOfAll), 1);
        },
        run_options(tiers, RankBackend::kLocal)
    );
  }
}

}  // namespace
}  // namespace hypershard::shard::test
