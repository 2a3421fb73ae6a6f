// Units that are updated inside backward and published in it: the same bits as published later, and
// nothing that was written after that is lost in silence.
#include <stdexcept>
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
constexpr int kNumEarly = 2;  // one of three, but neither the first nor any of the last quarter
constexpr const char* kEarlyWeight = "blocks.7.linear.weight";  // of one of them

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

  /// `apart` gives the weight of kEarlyBlock a group of its own, that may be frozen later.
  Descent(
      std::shared_ptr<comm::World> ranks,
      int replicate,
      const FullyShardOptions& options,
      bool early,
      bool apart = false
  )
      : sharded((
            set_weight_trainable(!apart), fully_shard(*model, make_mesh(ranks, replicate), options)
        )),
        world(std::move(ranks)),
        in_backward(early) {
    set_weight_trainable(true);
    if (in_backward) {
      sharded.engine().update_in_backward = descend;
    }
  }

  void set_weight_trainable(bool trainable) {
    for (const auto& item : model->named_parameters()) {
      if (item.key() == kEarlyWeight) {
        at::Tensor weight = item.value();
        weight.requires_grad_(trainable);
      }
    }
  }
  comm::CollectiveLog& publishes() const { return axis_of(sharded, "replicate").gather->log(); }
  at::Tensor loss(int index) {
    const at::Tensor batch = make_inputs(8, 5, index);
    return loss_of(model->forward(rows_of(batch, world->rank(), world->size())));
  }

  /// Returns how many gathers between supernodes were started by the forward and the backward.
  std::pair<std::int64_t, std::int64_t> step(int index) {
    sharded.zero_grad();
    return step_at_once(index);
  }
  /// The same as it comes right after an exception.
  std::pair<std::int64_t, std::int64_t> step_at_once(int index) {
    const auto before = publishes().count(comm::Op::kAllGather);
    const at::Tensor now = loss(index);
    const auto between = publishes().count(comm::Op::kAllGather);
    now.backward();
    const auto after = publishes().count(comm::Op::kAllGather);
    if (!in_backward) {
      for (const auto& unit : sharded.engine().units()) {
        descend(*unit);
      }
    }
    return {between - before, after - between};
  }
  /// A step whose backward throws in a block.
  void fail_in(int block, int index) {
    *model->visit_backward = [block](int number) {
      if (number == block) {
        throw std::runtime_error("a hook of the user's");
      }
    };
    EXPECT_ANY_THROW(step(index));
    *model->visit_backward = nullptr;
  }
  /// By hand, on every rank.
  void set_all(double value) {
    const at::NoGradGuard no_grad;
    for (at::Tensor& tensor : sharded.update_tensors()) {
      tensor.fill_(value);
    }
    sharded.sync_runtime();
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
          EXPECT_EQ(backward, kNumEarly);
          if (step % 3 == 1) {  // no evaluation published anything since the last step
            EXPECT_EQ(late_forward, kBlocks + 1);
            EXPECT_EQ(forward + backward, kBlocks + 1);
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
    EXPECT_NE(text.find("published some of them already"), std::string::npos) << text;
    EXPECT_NE(text.find("sync_runtime()"), std::string::npos) << text;
    training.sharded.sync_runtime();
    training.step(1);
    oracle.step(1);
    expect_equal(training.parameters(), oracle.parameters());
  });
}

TEST_P(EarlyPublishTest, AFailedBackwardLeavesAWorkingModel) {
  run({4, 2}, [&](const std::shared_ptr<comm::World>& world) {
    for (const bool at_once : {false, true}) {
      Descent training(world, 2, tier_options(Strategy::kHierarchical), /*early=*/true);
      Descent oracle(world, 2, tier_options(Strategy::kHierarchical), /*early=*/true);
      for (int step = 0; step < 4; ++step) {
        training.fail_in(kBlocks - 1, step);  // before any unit is posted
        at_once ? training.step_at_once(step) : training.step(step);
        oracle.step(step);
      }
      expect_equal(training.parameters(), oracle.parameters());
    }
  });
}

// How many units a rank has published by then is a matter of timing; what it gathers next must not
// be taken for one of them by another rank.
TEST_P(EarlyPublishTest, ABackwardThatFailsHalfwayIsRefusedUntilTheWeightsAreNew) {
  run({4, 2}, [&](const std::shared_ptr<comm::World>& world) {
    for (const bool goes_on_in_backward : {true, false}) {
      Descent training(world, 2, tier_options(Strategy::kHierarchical), /*early=*/true);
      Descent oracle(world, 2, tier_options(Strategy::kHierarchical), /*early=*/false);
      training.step(0);
      oracle.step(0);
      RandomSleep sleep(world->rank());
      *training.model->visit = [&](int) { sleep.pass(200); };
      training.fail_in(1, 1);
      if (!goes_on_in_backward) {
        training.sharded.engine().update_in_backward = nullptr;
        training.in_backward = false;
      }
      EXPECT_EQ(training.parameters().size(), 2 * kBlocks + 2);  // before the oracle's: one link
      const std::string text = thrown_by([&] { training.loss(2); });
      EXPECT_NE(text.find("a mix of two steps"), std::string::npos) << text;
      training.set_all(0.01);
      oracle.set_all(0.01);
      for (int step = 2; step < 4; ++step) {
        training.step(step);
        oracle.step(step);
      }
      expect_equal(training.parameters(), oracle.parameters());
    }
  });
}

TEST_P(EarlyPublishTest, NothingIsGatheredByHandInABackwardThatPublishes) {
  run({2, 2}, [&](const std::shared_ptr<comm::World>& world) {
    Descent training(world, 2, tier_options(Strategy::kHierarchical), /*early=*/true);
    training.step(0);
    std::string text;
    *training.model->visit_backward = [&](int block) {
      if (block == 1) {
        text = thrown_by([&] { training.parameters(); });
      }
    };
    training.step(1);
    EXPECT_NE(text.find("between steps"), std::string::npos) << text;
  });
}

TEST_P(EarlyPublishTest, UnitsMayBeFrozenInPartLater) {
  run({4, 2}, [&](const std::shared_ptr<comm::World>& world) {
    const FullyShardOptions options = tier_options(Strategy::kHierarchical);
    Descent late(world, 2, options, /*early=*/false, /*apart=*/true);
    Descent early(world, 2, options, /*early=*/true, /*apart=*/true);
    for (int step = 0; step < 6; ++step) {
      const bool trainable = step < 2 || step == 5;
      late.set_weight_trainable(trainable);
      early.set_weight_trainable(trainable);
      late.step(step);
      EXPECT_EQ(early.step(step).second, trainable ? kNumEarly + 1 : kNumEarly - 1)
          << "one has two groups";
    }
    expect_equal(late.parameters(), early.parameters());
  });
}

TEST_P(EarlyPublishTest, WhatIsNotScatteredBetweenSupernodesOrUpdatedLaterIsNotPublishedEarly) {
  const auto expect_none = [](Descent descent) {
    for (int step = 0; step < 3; ++step) {
      EXPECT_EQ(descent.step(step).second, 0);
    }
  };
  run({4, 2}, [&](const std::shared_ptr<comm::World>& world) {
    expect_none(Descent(world, 2, tier_options(Strategy::kHierarchical), /*early=*/false));
    // Its gathers have a second stage inside.
    expect_none(Descent(world, 2, tier_options(Strategy::kZero2), /*early=*/true));
  });
  run({2, 2}, [&](const std::shared_ptr<comm::World>& world) {
    expect_none(Descent(world, 2, tier_options(Strategy::kZero1), /*early=*/true));
  });
}

}  // namespace
}  // namespace hypershard::shard::test
