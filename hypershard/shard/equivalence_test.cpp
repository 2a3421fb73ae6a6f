// Sharded training equals the single-process run: gradients, losses and updated parameters, for
// every strategy, world and back end.
#include <string>
#include <tuple>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/optim/adamw.h>

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
};

std::string name_of(const ::testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  return to_text(c.strategy) + "_" + std::to_string(c.ranks) + "ranks_" +
         std::to_string(c.replicate) + "replicas_" + testing::to_text(c.backend) +
         (c.reshard ? "" : "_keep") + (c.share == Share::kOff ? "_unshared" : "");
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
  return cases;
}

FullyShardOptions options_of(const Case& c) {
  FullyShardOptions options;
  options.strategy = c.strategy;
  options.units = {"blocks.*"};
  options.reshard_after_forward = c.reshard;
  options.share = c.share;
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
      {.backend = c.backend}
  );
}

// Fifty AdamW steps; losses of the sharded run against the single process's.
TEST_P(EquivalenceTest, LossesOverFiftyStepsEqualTheSingleProcess) {
  const Case& c = GetParam();
  std::vector<double> expected;
  Net oracle;
  {
    torch::optim::AdamW optimizer(
        oracle->parameters(), torch::optim::AdamWOptions(0.01).weight_decay(0.1)
    );
    for (int step = 0; step < 50; ++step) {
      optimizer.zero_grad();
      const at::Tensor loss = loss_of(oracle->forward(make_inputs(kRows, 5, step)));
      expected.push_back(loss.item<double>());
      loss.backward();
      optimizer.step();
    }
  }
  for (const int accumulation : {1, 3}) {
    testing::run_ranks(
        c.ranks,
        [&](std::shared_ptr<comm::World> world) {
          const int rank = world->rank();
          Net model;
          const comm::ProcessMesh mesh = make_mesh(world, c.replicate);
          ShardedModel sharded = fully_shard(*model, mesh, options_of(c));
          torch::optim::AdamW optimizer(
              sharded.update_tensors(), torch::optim::AdamWOptions(0.01).weight_decay(0.1)
          );
          const auto control = world->world_communicator();
          for (int step = 0; step < 50; ++step) {
            optimizer.zero_grad();
            const at::Tensor batch = make_inputs(kRows, 5, step);
            at::Tensor total = at::zeros({1}, at::kDouble);
            for (int micro = 0; micro < accumulation; ++micro) {
              sharded.set_requires_gradient_sync(micro + 1 == accumulation);
              const at::Tensor part =
                  batch.narrow(0, micro * (kRows / accumulation), kRows / accumulation);
              // Uneven ranks: a rank's rows are weighted so that the mean over ranks is the mean
              // over rows.
              const std::int64_t rows = part.size(0);
              const std::int64_t begin = rows * rank / c.ranks;
              const std::int64_t end = rows * (rank + 1) / c.ranks;
              const at::Tensor mine = part.narrow(0, begin, end - begin);
              const double weight =
                  static_cast<double>(end - begin) * c.ranks / static_cast<double>(rows);
              const at::Tensor loss = loss_of(model->forward(mine)) * (weight / accumulation);
              total += loss.detach();
              loss.backward();
            }
            optimizer.step();
            control->all_reduce(total)->wait_released();
            const double loss = total.item<double>() / c.ranks;
            ASSERT_NEAR(
                loss,
                expected[static_cast<std::size_t>(step)],
                1e-10 * std::abs(expected[static_cast<std::size_t>(step)])
            ) << "step "
              << step << " accumulation " << accumulation;
          }
          for (const auto& item : oracle->named_parameters()) {
            EXPECT_LE(
                (sharded.full_parameter(item.key()) - item.value()).abs().max().item<double>(), 1e-9
            ) << item.key();
          }
        },
        {.backend = c.backend}
    );
  }
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
