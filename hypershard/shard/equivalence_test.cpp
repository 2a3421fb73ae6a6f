// Sharded training equals the single-process run: gradients, losses and updated parameters, for
// every strategy, world and back end.
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/optim/adamw.h>

#include "hypershard/layout/bucket.h"
#include "hypershard/shard/engine.h"
#include "hypershard/shard/test_models.h"

namespace hypershard::shard::test {
namespace {

using layout::Strategy;
using testing::RankBackend;

struct Case {
  Strategy strategy;
  int ranks;
  int replicate;
  RankBackend backend;
  bool reshard = true;
  Share share = Share::kAuto;
  bool tiers = false;  ///< replicas lie in supernodes of their own
  std::int64_t bucket_bytes = layout::kBucketOfOne;
};

std::string name_of(const ::testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  return to_text(c.strategy) + "_" + std::to_string(c.ranks) + "ranks_" +
         std::to_string(c.replicate) + "replicas_" + testing::to_text(c.backend) +
         (c.reshard ? "" : "_keep") + (c.share == Share::kOff ? "_unshared" : "") +
         (c.tiers ? "_tiers" : "") +
         (c.bucket_bytes == layout::kBucketOfOne   ? ""
          : c.bucket_bytes == layout::kBucketOfAll ? "_one_bucket"
                                                   : "_buckets");
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const RankBackend backend : all_backends()) {
    for (const Strategy strategy :
         {Strategy::kDdp, Strategy::kZero1, Strategy::kZero2, Strategy::kZero3}) {
      for (const int ranks : {1, 2, 3, 4}) {
        cases.push_back({strategy, ranks, 1, backend});
      }
      cases.push_back({strategy, 4, 2, backend});
    }
    for (const Strategy strategy : {Strategy::kHsdp, Strategy::kHierarchical}) {
      cases.push_back({strategy, 2, 2, backend});
      cases.push_back({strategy, 4, 2, backend});
    }
    cases.push_back({Strategy::kZero3, 2, 1, backend, /*reshard=*/false});
    cases.push_back({Strategy::kZero3, 2, 1, backend, true, Share::kOff});
  }
  for (const RankBackend backend : {RankBackend::kLocal, RankBackend::kShm}) {
    for (const Strategy strategy :
         {Strategy::kDdp,
          Strategy::kZero2,
          Strategy::kZero3,
          Strategy::kHsdp,
          Strategy::kHierarchical}) {
      for (const int ranks : {2, 4}) {
        cases.push_back(
            {.strategy = strategy, .ranks = ranks, .replicate = 2, .backend = backend, .tiers = true
            }
        );
      }
    }
    cases.push_back(
        {.strategy = Strategy::kHierarchical,
         .ranks = 4,
         .replicate = 4,
         .backend = backend,
         .tiers = true}
    );
  }
  // More than a unit and less than all of them, and all.
  for (const std::int64_t bucket_bytes : {std::int64_t{2000}, layout::kBucketOfAll}) {
    for (const RankBackend backend :
         {RankBackend::kLocal, RankBackend::kDelayed, RankBackend::kGloo}) {
      for (const int ranks : {2, 4}) {
        cases.push_back(
            {.strategy = Strategy::kHierarchical,
             .ranks = ranks,
             .replicate = 2,
             .backend = backend,
             .tiers = true,
             .bucket_bytes = bucket_bytes}
        );
      }
    }
    cases.push_back(
        {.strategy = Strategy::kHsdp,
         .ranks = 4,
         .replicate = 2,
         .backend = RankBackend::kLocal,
         .tiers = true,
         .bucket_bytes = bucket_bytes}
    );
  }
  return cases;
}

testing::RunRanksOptions run_options(const Case& c, double deadline_s = 60) {
  testing::RunRanksOptions options{.backend = c.backend, .deadline_s = deadline_s};
  for (int rank = 0; c.tiers && rank < c.ranks; ++rank) {
    options.supernodes.push_back("supernode " + std::to_string(rank / (c.ranks / c.replicate)));
  }
  return options;
}

FullyShardOptions options_of(const Case& c) {
  FullyShardOptions options;
  options.strategy = c.strategy;
  options.units = {"blocks.*"};
  options.reshard_after_forward = c.reshard;
  options.share = c.share;
  options.bucket_bytes = c.bucket_bytes;
  return options;
}

class EquivalenceTest : public ::testing::TestWithParam<Case> {};

constexpr std::int64_t kRows = 12;

TEST_P(EquivalenceTest, GradientsEqualTheUnshardedModel) {
  const Case& c = GetParam();
  testing::run_ranks(
      c.ranks,
      [&](std::shared_ptr<comm::World> world) {
        const int rank = world->rank();
        Net oracle;
        Net model;
        const comm::ProcessMesh mesh = make_mesh(world, c.replicate);
        const ShardedModel sharded = fully_shard(*model, mesh, options_of(c));
        for (int step = 0; step < 2; ++step) {
          const at::Tensor batch = make_inputs(kRows, 5, step);
          const auto expected =
              reference_gradients([&] { return loss_of(oracle->forward(batch)); }, *oracle);
          sharded.zero_grad();
          loss_of(model->forward(rows_of(batch, rank, c.ranks))).backward();
          for (const auto& [name, gradient] : expected) {
            const at::Tensor found = sharded.full_gradient(name);
            ASSERT_TRUE(found.defined()) << name;
            EXPECT_LE((found - gradient).abs().max().item<double>(), 1e-12)
                << name << " step " << step;
          }
        }
      },
      run_options(c)
  );
}

/// What is stored and computed in which dtype, and how near the losses then are.
struct Numerics {
  const char* name = "";
  at::ScalarType dtype = at::kFloat;
  std::optional<at::ScalarType> compute = {};
  double early_bound = 0;  ///< over the first five steps, relative to the loss
  double bound = 0;        ///< over all fifty, relative to the loss; for bf16 to the first loss
};

constexpr int kSteps = 50;
// bf16 is held against fp32 without it. It keeps 8 bits of every product and sum, so a loss is
// known to some thousandths of where it came from, not of what is left of it.
const Numerics kNumerics[] = {
    {"fp64", at::kDouble, std::nullopt, 1e-10, 1e-10},
    {"fp32", at::kFloat, std::nullopt, 1e-6, 1e-4},
    {"bf16", at::kFloat, at::kBFloat16, 0.01, 0.01},
};

torch::optim::AdamWOptions adamw() {
  return torch::optim::AdamWOptions(0.01).weight_decay(0.1);
}

/// The single process: its losses and where its parameters end.
struct Reference {
  std::vector<double> losses;
  Net model;
};

Reference train_alone(const Numerics& numerics) {
  Reference reference;
  reference.model->to(numerics.dtype);
  torch::optim::AdamW optimizer(reference.model->parameters(), adamw());
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const at::Tensor batch = make_inputs(kRows, 5, step, numerics.dtype);
    const at::Tensor loss = loss_of(reference.model->forward(batch));
    reference.losses.push_back(loss.item<double>());
    loss.backward();
    optimizer.step();
  }
  return reference;
}

/// Ranks may have uneven rows: each rank's are weighted so that the mean over ranks is that over
/// rows.
at::Tensor own_loss(NetImpl& model, const at::Tensor& rows, int rank, int num_ranks) {
  const std::int64_t begin = rows.size(0) * rank / num_ranks;
  const std::int64_t end = rows.size(0) * (rank + 1) / num_ranks;
  const double weight =
      static_cast<double>(end - begin) * num_ranks / static_cast<double>(rows.size(0));
  return loss_of(model.forward(rows.narrow(0, begin, end - begin))) * weight;
}

void expect_losses(
    const std::shared_ptr<comm::World>& world,
    const Case& c,
    const Numerics& numerics,
    int accumulation,
    const Reference& expected
) {
  Net model;
  model->to(numerics.dtype);
  FullyShardOptions options = options_of(c);
  if (numerics.compute) {
    options.precision.compute = *numerics.compute;
    options.precision.output = numerics.dtype;
  }
  const comm::ProcessMesh mesh = make_mesh(world, c.replicate);
  ShardedModel sharded = fully_shard(*model, mesh, options);
  torch::optim::AdamW optimizer(sharded.update_tensors(), adamw());
  const auto control = world->world_communicator();
  const std::int64_t rows = kRows / accumulation;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const at::Tensor batch = make_inputs(kRows, 5, step, numerics.dtype);
    at::Tensor total = at::zeros({1}, at::kDouble);
    for (int micro = 0; micro < accumulation; ++micro) {
      sharded.set_requires_gradient_sync(micro + 1 == accumulation);
      const at::Tensor loss =
          own_loss(*model, batch.narrow(0, micro * rows, rows), world->rank(), c.ranks) /
          accumulation;
      total += loss.detach();
      loss.backward();
    }
    optimizer.step();
    control->all_reduce(total)->wait_released();
    const double wanted = expected.losses[static_cast<std::size_t>(step)];
    const double scale = std::abs(numerics.compute ? expected.losses.front() : wanted);
    const double bound = step < 5 ? numerics.early_bound : numerics.bound;
    ASSERT_NEAR(total.item<double>() / c.ranks, wanted, bound * scale)
        << numerics.name << " step " << step << " accumulation " << accumulation;
  }
  if (numerics.dtype == at::kDouble) {
    for (const auto& item : expected.model->named_parameters()) {
      EXPECT_LE(
          (sharded.full_parameter(item.key()) - item.value()).abs().max().item<double>(), 1e-9
      ) << item.key();
    }
  }
}

TEST_P(EquivalenceTest, LossesOverFiftyStepsEqualTheSingleProcess) {
  const Case& c = GetParam();
  std::vector<Reference> expected;
  for (const Numerics& numerics : kNumerics) {
    expected.push_back(train_alone(numerics));
  }
  testing::run_ranks(
      c.ranks,
      [&](const std::shared_ptr<comm::World>& world) {
        for (std::size_t i = 0; i < expected.size(); ++i) {
          for (const int accumulation : {1, 3}) {
            expect_losses(world, c, kNumerics[i], accumulation, expected[i]);
          }
        }
      },
      run_options(c, /*deadline_s=*/120)
  );
}

INSTANTIATE_TEST_SUITE_P(All, EquivalenceTest, ::testing::ValuesIn(all_cases()), name_of);

// One rank computing everything is the oracle of the oracle: sharing or gathering must not change a
// bit.
TEST(SharingTest, SharedAndGatheredRuntimeGiveTheSameBits) {
  std::vector<std::vector<double>> losses;
  for (const Share share : {Share::kOn, Share::kOff}) {
    std::vector<double> run;
    testing::run_ranks(2, [&](std::shared_ptr<comm::World> world) {
      const int rank = world->rank();
      Net model;
      const comm::ProcessMesh mesh = make_mesh(world);
      FullyShardOptions options;
      options.units = {"blocks.*"};
      options.share = share;
      ShardedModel sharded = fully_shard(*model, mesh, options);
      const auto mode = sharded.engine().units()[1]->groups()[0]->mode();
      EXPECT_EQ(mode, share == Share::kOn ? RuntimeMode::kShared : RuntimeMode::kGathered);
      torch::optim::AdamW optimizer(sharded.update_tensors(), torch::optim::AdamWOptions(0.01));
      for (int step = 0; step < 10; ++step) {
        optimizer.zero_grad();
        const at::Tensor loss =
            loss_of(model->forward(rows_of(make_inputs(kRows, 5, step), rank, 2)));
        loss.backward();
        optimizer.step();
        if (rank == 0) {
          run.push_back(loss.item<double>());
        }
      }
    });
    losses.push_back(run);
  }
  EXPECT_EQ(losses[0], losses[1]);
}

}  // namespace
}  // namespace hypershard::shard::test
