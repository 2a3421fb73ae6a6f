// Accumulation over two tiers: whatever is summed where, and when, comes out as the gradient of the
// whole batch, for every strategy, kind of unit and bucket.
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "hypershard/shard/test_two_tier.h"

namespace hypershard::shard::test {
namespace {

using layout::Strategy;
using testing::RankBackend;

/// After which micro-batches gradients are summed, and how far.
enum class Sync {
  kEvery,  ///< after each, over all ranks
  kLast,   ///< after the last only
  kInner,  ///< inside the supernode after each, between supernodes after the last
};

struct Accumulation {
  Sync sync = Sync::kEvery;
  int num_micro = 1;
};

std::string to_text(const Accumulation& how) {
  const char* names[] = {"every", "last", "inner"};
  return std::string("sync ") + names[static_cast<int>(how.sync)] + ", " +
         std::to_string(how.num_micro) + " micro-batches";
}

/// Of one micro-batch the first is the last.
std::vector<Accumulation> all_accumulations() {
  std::vector<Accumulation> all{{Sync::kEvery, 1}};
  for (const Sync sync : {Sync::kEvery, Sync::kLast, Sync::kInner}) {
    for (const int num_micro : {2, 4}) {
      all.push_back({sync, num_micro});
    }
  }
  return all;
}

/// What is computed in which dtype, and how near it then is: losses to the whole batch's, relative
/// to them; gradients too, in fp32 relative to their largest element.
struct Numerics {
  at::ScalarType dtype;
  double bound;
  Deviation deviation;
};
constexpr Numerics kFp64{at::kDouble, 1e-12, Deviation::kAbsolute};
constexpr Numerics kFp32{at::kFloat, 1e-6, Deviation::kRelative};

/// Runs forward and backward of all micro-batches; returns the sum of the losses.
at::Tensor accumulate(
    const ShardedModel& sharded,
    const std::function<at::Tensor(const at::Tensor&)>& forward,
    const at::Tensor& batch,
    const Accumulation& how,
    const comm::World& world
) {
  at::Tensor total = at::zeros({}, at::kDouble);
  const std::int64_t rows = batch.size(0) / how.num_micro;
  for (int micro = 0; micro < how.num_micro; ++micro) {
    const bool is_last = micro + 1 == how.num_micro;
    sharded.set_requires_gradient_sync(how.sync != Sync::kLast || is_last);
    sharded.set_requires_all_reduce(how.sync != Sync::kInner || is_last);
    const at::Tensor part =
        rows_of(batch.narrow(0, rows * micro, rows), world.rank(), world.size());
    const at::Tensor loss = loss_of(forward(part)) / how.num_micro;
    loss.backward();
    total += loss.detach();
  }
  return total;
}

/// Backwards of all micro-batches, in two steps, so that what one leaves behind would show.
template <class Holder>
void expect_whole_batch(
    const std::shared_ptr<comm::World>& world,
    const comm::ProcessMesh& mesh,
    const FullyShardOptions& options,
    const Accumulation& how,
    const Numerics& numerics
) {
  Holder oracle;
  Holder model;
  oracle->to(numerics.dtype);
  model->to(numerics.dtype);
  const ShardedModel sharded = fully_shard(*model, mesh, options);
  const auto forward = [&](const at::Tensor& rows) { return model->forward(rows); };
  const std::string what = to_text(options.strategy) + ", " + to_text(how) + ", buckets of " +
                           std::to_string(*options.bucket_bytes);
  for (int step = 0; step < 2; ++step) {
    sharded.zero_grad();
    const at::Tensor batch = make_inputs(16, 5, step, numerics.dtype);
    double wanted = 0;
    const auto expected = trainable_gradients(
        [&] {
          const at::Tensor loss = loss_of(oracle->forward(batch));
          wanted = loss.item<double>();
          return loss;
        },
        *oracle
    );
    const double loss = mean_over(*world, accumulate(sharded, forward, batch, how, *world));
    EXPECT_NEAR(loss, wanted, numerics.bound * std::abs(wanted)) << what << ", step " << step;
    EXPECT_LE(worst_gradient(sharded, expected, numerics.deviation), numerics.bound)
        << what << ", step " << step;
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
      for (const Tiers& tiers : kMeshes) {
        if (backend == RankBackend::kLocal || tiers.num_supernodes == 2) {
          cases.push_back({strategy, tiers, backend});
        }
      }
    }
  }
  return cases;
}

class TwoTierAccumulationTest : public ::testing::TestWithParam<Case> {
 protected:
  template <class Holder>
  static void run(const Numerics& numerics, const std::vector<std::int64_t>& buckets) {
    const Case& c = GetParam();
    testing::run_ranks(
        c.tiers.num_ranks,
        [&](const std::shared_ptr<comm::World>& world) {
          const comm::ProcessMesh mesh =
              make_mesh(world, c.tiers.num_supernodes, /*has_both=*/true);
          for (const std::int64_t bucket_bytes : buckets) {
            for (const Accumulation& how : all_accumulations()) {
              expect_whole_batch<Holder>(
                  world, mesh, tier_options(c.strategy, bucket_bytes), how, numerics
              );
            }
          }
        },
        run_options(c.tiers, c.backend)
    );
  }
};

TEST_P(TwoTierAccumulationTest, EqualUnitsGetTheGradientOfTheWholeBatch) {
  run<Net>(kFp64, bucket_sizes(GetParam().tiers));
}

// Blocks of three sizes, a frozen one, one that runs twice, two that share a layer.
TEST_P(TwoTierAccumulationTest, OddUnitsGetTheGradientOfTheWholeBatch) {
  run<OddNet>(kFp64, bucket_sizes(GetParam().tiers));
}

INSTANTIATE_TEST_SUITE_P(All, TwoTierAccumulationTest, ::testing::ValuesIn(all_cases()), name_of);

std::vector<Case> fp32_cases() {
  std::vector<Case> cases;
  for (const Case& c : all_cases()) {
    if (c.backend == RankBackend::kLocal && c.tiers.num_supernodes == 2) {
      cases.push_back(c);
    }
  }
  return cases;
}

class Fp32AccumulationTest : public TwoTierAccumulationTest {};

TEST_P(Fp32AccumulationTest, EqualUnitsGetTheGradientOfTheWholeBatch) {
  run<Net>(kFp32, {kSomeUnits / 2});
}

TEST_P(Fp32AccumulationTest, OddUnitsGetTheGradientOfTheWholeBatch) {
  run<OddNet>(kFp32, {kSomeUnits / 2});
}

INSTANTIATE_TEST_SUITE_P(All, Fp32AccumulationTest, ::testing::ValuesIn(fp32_cases()), name_of);

/// How many buckets a model has.
template <class Holder>
int count_buckets(const comm::ProcessMesh& mesh, at::ScalarType dtype, std::int64_t bucket_bytes) {
  Holder model;
  model->to(dtype);
  return num_buckets(fully_shard(*model, mesh, tier_options(Strategy::kHierarchical, bucket_bytes))
  );
}

// The sizes above mean what they say, or the tests would test one of them thrice.
TEST(BucketSizesTest, AreOfOneUnitOfSomeAndOfAll) {
  for (const Tiers& tiers : {Tiers{2, 2}, Tiers{4, 2}, Tiers{4, 4}}) {
    testing::run_ranks(
        tiers.num_ranks,
        [&](const std::shared_ptr<comm::World>& world) {
          const comm::ProcessMesh mesh = make_mesh(world, tiers.num_supernodes);
          EXPECT_EQ(count_buckets<Net>(mesh, at::kDouble, layout::kBucketOfOne), 4);
          EXPECT_EQ(count_buckets<OddNet>(mesh, at::kDouble, layout::kBucketOfOne), 5);
          for (const int some :
               {count_buckets<Net>(mesh, at::kDouble, kSomeUnits),
                count_buckets<OddNet>(mesh, at::kDouble, kSomeUnits),
                count_buckets<Net>(mesh, at::kFloat, kSomeUnits / 2),
                count_buckets<OddNet>(mesh, at::kFloat, kSomeUnits / 2)}) {
            EXPECT_GT(some, 1) << to_text(tiers);
            EXPECT_LT(some, 4) << to_text(tiers);
          }
          EXPECT_EQ(count_buckets<Net>(mesh, at::kDouble, layout::kBucketOfAll), 1);
          EXPECT_EQ(count_buckets<OddNet>(mesh, at::kDouble, layout::kBucketOfAll), 1);
        },
        run_options(tiers, RankBackend::kLocal)
    );
  }
}

}  // namespace
}  // namespace hypershard::shard::test
