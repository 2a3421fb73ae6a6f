// Units that are updated inside backward and published in it: the same bits as published later, and
// nothing that was written after that is lost in silence.
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "hypershard/shard/test_probed_net.h"
#include "hypershard/shard/test_two_tier.h"

namespace hypershard::shard::test {
namespace {

using layout::Strategy;
using testing::RankBackend;

constexpr int kBlocks = 9;

std::string name_of(const ::testing::TestParamInfo<RankBackend>& info) {
  return testing::to_text(info.param);
}

void descend(const Unit& unit) {
  const at::NoGradGuard no_grad;
  for (const auto& group : unit.groups()) {
    for (const UpdateTensor& update : group->updates()) {
      if (update.tensor.grad().defined()) {
        at::Tensor tensor = update.tensor;
        tensor.add_(update.tensor.grad(), -0.005);
      }
    }
  }
}

/// Gradient descent of one model on one rank, each unit updated in backward or all after it.
struct Descent {
  ProbedNet model{kBlocks};
  ShardedModel sharded;
  std::shared_ptr<comm::World> world;
  bool in_backward;

  Descent(std::shared_ptr<comm::World> ranks, int replicate, FullyShardOptions options, bool early)
      : sharded(fully_shard(*model, make_mesh(ranks, replicate), options)),
        world(std::move(ranks)),
        in_backward(early) {
    if (in_backward) {
      sharded.engine().update_in_backward = descend;
    }
  }

  comm::CollectiveLog& publishes() const { return axis_of(sharded, "replicate").gather->log(); }

  /// Returns how many gathers between supernodes were started by the forward and the backward.
  std::pair<std::int64_t, std::int64_t> step(int index) {
    sharded.zero_grad();
    const auto before = publishes().count(comm::Op::kAllGather);
    const at::Tensor batch = make_inputs(8, 5, index);
    const at::Tensor loss = loss_of(model->forward(rows_of(batch, world->rank(), world->size())));
    const auto between = publishes().count(comm::Op::kAllGather);
    loss.backward();
    const auto after = publishes().count(comm::Op::kAllGather);
    if (!in_backward) {
      for (const auto& unit : sharded.engine().units()) {
        descend(*unit);
      }
    }
    return {between - before, after - between};
  }

  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all;
    sharded.visit_full_parameters([&](const std::string&, const at::Tensor& full) {
      all.push_back(full.clone());
    });
    return all;
  }
};

void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(at::isfinite(a[i]).all().item<bool>()) << "parameter " << i;
    EXPECT_TRUE(a[i].equal(b[i])) << "parameter " << i;
  }
}

class EarlyPublishTest : public ::testing::TestWithParam<RankBackend> {
 protected:
  template <class Body>
  void run(const Tiers& tiers, const Body& body) const {
    testing::run_ranks(tiers.num_ranks, body, run_options(tiers, GetParam()));
  }
};
INSTANTIATE_TEST_SUITE_P(Backends, EarlyPublishTest, ::testing::ValuesIn(all_backends()), name_of);

TEST_P(EarlyPublishTest, GivesTheSameBitsWhoeverIsLate) {
  for (const Tiers& tiers : {Tiers{2, 2}, Tiers{4, 2}, Tiers{4, 4}}) {
    run(tiers, [&](const std::shared_ptr<comm::World>& world) {
      for (const bool wide : {false, true}) {
        FullyShardOptions options = tier_options(Strategy::kHierarchical);
        if (wide) {  // runtime and update parameters apart
          options.precision.compute = at::kFloat;
          options.precision.update = at::kDouble;
        }
        Descent late(world, tiers.num_supernodes, options, /*early=*/false);
        Descent early(world, tiers.num_supernodes, options, /*early=*/true);
        RandomSleep sleep(world->rank());
        *early.model->visit = [&](int) { sleep.pass(200); };
        *early.model->visit_backward = *early.model->visit;
        for (int step = 0; step < 8; ++step) {
          const auto [late_forward, late_backward] = late.step(step);
          const auto [forward, backward] = early.step(step);
          EXPECT_EQ(late_backward, 0);
          if (step % 3 == 2) {  // no evaluation published anything since the last one
            EXPECT_EQ(late_forward, kBlocks + 1);
            EXPECT_EQ(forward + backward, kBlocks + 1);
            EXPECT_EQ(backward, 2) << "one of three, but none of the last quarter";
          }
          if (step % 3 == 2) {  // an evaluation between, which publishes for good
            const at::NoGradGuard no_grad;
            const at::Tensor rows = rows_of(make_inputs(8, 5, 99), world->rank(), world->size());
            EXPECT_TRUE(late.model->forward(rows).equal(early.model->forward(rows)));
          }
        }
        expect_equal(late.parameters(), early.parameters());
      }
    });
  }
}

TEST_P(EarlyPublishTest, WhatIsWrittenAfterwardsIsRefusedOrPublishedAgain) {
  const Tiers tiers{4, 2};
  run(tiers, [&](const std::shared_ptr<comm::World>& world) {
    Descent training(world, 2, tier_options(Strategy::kHierarchical), /*early=*/true);
    Descent oracle(world, 2, tier_options(Strategy::kHierarchical), /*early=*/false);
    const auto double_all = [](const Descent& descent) {
      const at::NoGradGuard no_grad;
      for (at::Tensor& tensor : descent.sharded.update_tensors()) {
        tensor.mul_(2);
      }
    };
    training.step(0);
    oracle.step(0);
    double_all(training);
    double_all(oracle);
    const std::string text = thrown_by([&] { training.step(1); });
    EXPECT_NE(text.find("sync_runtime()"), std::string::npos) << text;
    training.sharded.sync_runtime();
    training.step(1);
    oracle.step(1);
    expect_equal(training.parameters(), oracle.parameters());
  });
}

TEST_P(EarlyPublishTest, OneTierAndUpdatesAfterBackwardPublishNothingEarly) {
  run({4, 2}, [&](const std::shared_ptr<comm::World>& world) {
    for (const Strategy strategy : {Strategy::kZero1, Strategy::kZero2}) {
      Descent training(world, 2, tier_options(strategy), /*early=*/true);
      for (int step = 0; step < 3; ++step) {
        EXPECT_EQ(training.step(step).second, 0) << "its gathers have a second stage inside";
      }
    }
  });
}

}  // namespace
}  // namespace hypershard::shard::test
