// What is frozen is published when it is frozen and when sync_runtime() asks for it, not in every
// step.
#include <cmath>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/optim/adamw.h>

#include "hypershard/shard/test_probed_net.h"
#include "hypershard/shard/test_two_tier.h"

namespace hypershard::shard::test {
namespace {

using layout::Strategy;
using testing::RankBackend;

constexpr int kBlocks = 4;
constexpr std::int64_t kGroups =
    kBlocks + 1 + 1;  // the root's, and a block of which half is frozen
constexpr std::int64_t kFrozenGroups = 2;
constexpr double kNear = 1e-11;

/// Block 1 is frozen, and the weight of block 2.
void freeze(ProbedNet& model) {
  for (const auto& item : model->named_parameters()) {
    const bool is_frozen =
        item.key().starts_with("blocks.1.") || item.key() == "blocks.2.linear.weight";
    at::Tensor parameter = item.value();
    parameter.requires_grad_(!is_frozen);
  }
}

void set_block_1(ProbedNet& model, bool trainable) {
  for (at::Tensor& parameter : model->blocks[1]->parameters()) {
    parameter.requires_grad_(trainable);
  }
}

/// A half-frozen model, sharded over two supernodes of two ranks, beside the same on one rank.
struct HalfFrozen {
  HalfFrozen(const std::shared_ptr<comm::World>& a_world, const FullyShardOptions& options)
      : world(a_world),
        oracle(kBlocks),
        model(kBlocks),
        plain(oracle->parameters(), torch::optim::AdamWOptions(0.01)),
        sharded((freeze(oracle), freeze(model), fully_shard(*model, make_mesh(world, 2), options))),
        optimizer(sharded.update_tensors(), torch::optim::AdamWOptions(0.01)) {}

  std::int64_t gathers() const {
    return axis_of(sharded, "replicate").gather->log().count(comm::Op::kAllGather);
  }
  /// Returns how many groups the forward published between supernodes.
  std::int64_t step(int number) {
    const at::Tensor batch = make_inputs(8, 5, number);
    plain.zero_grad();
    optimizer.zero_grad();
    loss_of(oracle->forward(batch)).backward();
    const std::int64_t before = gathers();
    const at::Tensor loss = loss_of(model->forward(rows_of(batch, world->rank(), world->size())));
    const std::int64_t published = gathers() - before;
    loss.backward();
    plain.step();
    optimizer.step();
    return published;
  }
  double worst_output() {
    const at::NoGradGuard no_grad;
    const at::Tensor batch = make_inputs(8, 5, 77);
    const at::Tensor worst = (model->forward(batch) - oracle->forward(batch)).abs().max();
    return at::isfinite(worst).item<bool>() ? worst.item<double>() : HUGE_VAL;
  }
  /// By hand, on every rank.
  void halve_everything() {
    const at::NoGradGuard no_grad;
    for (at::Tensor& tensor : sharded.update_tensors()) {
      tensor.mul_(0.5);
    }
    for (at::Tensor& tensor : oracle->parameters()) {
      tensor.mul_(0.5);
    }
  }

  std::shared_ptr<comm::World> world;
  ProbedNet oracle;
  ProbedNet model;
  torch::optim::AdamW plain;
  ShardedModel sharded;
  torch::optim::AdamW optimizer;
};

class FrozenPublishTest : public ::testing::TestWithParam<RankBackend> {
 protected:
  template <class Body>
  static void run(const Body& body) {
    const auto all = [&](const std::shared_ptr<comm::World>& world) {
      for (const Strategy strategy :
           {Strategy::kHierarchical, Strategy::kZero1, Strategy::kZero2}) {
        for (const Share share : {Share::kAuto, Share::kOff}) {
          FullyShardOptions options = tier_options(strategy);
          options.share = share;
          HalfFrozen pair(world, options);
          body(pair);
        }
      }
    };
    testing::run_ranks(4, all, run_options({4, 2}, GetParam()));
  }
};
INSTANTIATE_TEST_SUITE_P(
    Backends,
    FrozenPublishTest,
    ::testing::ValuesIn(all_backends()),
    [](const auto& each) { return testing::to_text(each.param); }
);

TEST_P(FrozenPublishTest, WhatIsFrozenCrossesOnce) {
  run([](HalfFrozen& pair) {
    EXPECT_EQ(pair.step(0), kGroups) << "once, to begin with";
    for (int step = 1; step < 4; ++step) {
      EXPECT_EQ(pair.step(step), kGroups - kFrozenGroups);
    }
    EXPECT_LE(pair.worst_output(), kNear);
  });
}

TEST_P(FrozenPublishTest, MayBeUnfrozenAndFrozenAgain) {
  run([](HalfFrozen& pair) {
    pair.step(0);
    const auto both = [&](bool trainable) {
      set_block_1(pair.oracle, trainable);
      set_block_1(pair.model, trainable);
    };
    both(true);
    for (int step = 1; step < 3; ++step) {
      EXPECT_EQ(pair.step(step), kGroups - 1);
      EXPECT_LE(pair.worst_output(), kNear);
    }
    both(false);
    EXPECT_EQ(pair.step(3), kGroups - 1) << "the last step before it was frozen is still to cross";
    EXPECT_EQ(pair.step(4), kGroups - kFrozenGroups);
    EXPECT_LE(pair.worst_output(), kNear);
  });
}

TEST_P(FrozenPublishTest, WhatIsWrittenByHandIsAskedFor) {
  run([](HalfFrozen& pair) {
    pair.step(0);
    pair.step(1);
    pair.halve_everything();
    const std::string text = thrown_by([&] { pair.model->forward(make_inputs(8, 5, 0)); });
    // A rank that owns nothing of a group sees no write of it; here each owns some.
    EXPECT_NE(text.find("frozen"), std::string::npos) << text;
    EXPECT_NE(text.find("sync_runtime()"), std::string::npos) << text;
    const std::int64_t before = pair.gathers();
    pair.sharded.sync_runtime();
    EXPECT_EQ(pair.gathers() - before, kGroups);
    EXPECT_LE(pair.worst_output(), kNear);
    EXPECT_EQ(pair.step(2), 0) << "there is nothing new";
    EXPECT_EQ(pair.step(3), kGroups - kFrozenGroups);
    EXPECT_LE(pair.worst_output(), kNear);
  });
}

}  // namespace
}  // namespace hypershard::shard::test
