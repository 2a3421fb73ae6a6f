// What may happen while publishes are under way: reading by hand, evaluation, skipped units,
// failures, gathers of the caller's own.
#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "hypershard/core/error.h"
#include "hypershard/shard/publisher.h"
#include "hypershard/shard/test_probed_net.h"

namespace hypershard::shard::test {
namespace {

using layout::Strategy;
using testing::RankBackend;

constexpr int kRanks = 4;
constexpr int kBlocks = 12;
const std::vector<std::string> kTwoNodes{"a", "a", "b", "b"};

/// A sharded model beside the same on one rank.
struct Pair {
  Pair(const std::shared_ptr<comm::World>& a_world, Strategy strategy, Share share)
      : world(a_world),
        oracle(kBlocks),
        model(kBlocks),
        plain(oracle->parameters(), torch::optim::AdamWOptions(0.01)),
        sharded(make(strategy, share)),
        optimizer(sharded.update_tensors(), torch::optim::AdamWOptions(0.01)) {}

  ShardedModel make(Strategy strategy, Share share) {
    FullyShardOptions options;
    options.units = {"blocks.*"};
    options.strategy = strategy;
    options.share = share;
    return fully_shard(*model, make_mesh(world, 2), options);
  }
  at::Tensor rows(int step) const {
    return rows_of(make_inputs(8, 5, step), world->rank(), kRanks);
  }
  at::Tensor loss(int step) { return loss_of(model->forward(rows(step))); }
  void step(int number) {
    plain.zero_grad();
    optimizer.zero_grad();
    loss_of(oracle->forward(make_inputs(8, 5, number))).backward();
    loss(number).backward();
    update();
  }
  void update() {
    plain.step();
    optimizer.step();
  }
  double worst_output(int step) {
    const at::NoGradGuard no_grad;
    const at::Tensor batch = make_inputs(4, 5, step);
    return (model->forward(batch) - oracle->forward(batch)).abs().max().item<double>();
  }
  double worst_parameter() const {
    double worst = 0;
    for (const auto& item : oracle->named_parameters()) {
      worst = std::max(worst, largest_difference(sharded.full_parameter(item.key()), item.value()));
    }
    return worst;
  }
  /// How many units' own parts are still under way.
  int num_under_way() const {
    int count = 0;
    for (const auto& unit : sharded.engine().units()) {
      count += sharded.engine().publisher().has_arrived(*unit) ? 0 : 1;
    }
    return count;
  }

  std::shared_ptr<comm::World> world;
  ProbedNet oracle;
  ProbedNet model;
  torch::optim::AdamW plain;
  ShardedModel sharded;
  torch::optim::AdamW optimizer;
};

constexpr double kNear = 1e-11;

class PublishUsageTest : public ::testing::TestWithParam<RankBackend> {
 protected:
  /// Runs `body` for layouts that publish over one axis or two, into shared buffers or not.
  static void run(const std::function<void(Pair&)>& body) {
    testing::run_ranks(
        kRanks,
        [&](const std::shared_ptr<comm::World>& world) {
          for (const Strategy strategy : {Strategy::kHierarchical, Strategy::kZero1}) {
            for (const Share share : {Share::kAuto, Share::kOff}) {
              Pair pair(world, strategy, share);
              body(pair);
            }
          }
        },
        {.backend = GetParam(), .supernodes = kTwoNodes}
    );
  }
  /// On the delayed back end nothing arrives unasked.
  static bool is_late() { return GetParam() == RankBackend::kDelayed; }
};
INSTANTIATE_TEST_SUITE_P(
    Backends,
    PublishUsageTest,
    ::testing::ValuesIn(all_backends()),
    [](const auto& each) { return testing::to_text(each.param); }
);

TEST_P(PublishUsageTest, WhatIsReadRightAfterAStepIsCurrent) {
  run([](Pair& pair) {
    for (int step = 0; step < 3; ++step) {
      pair.step(step);
      EXPECT_LE(pair.worst_parameter(), kNear);
      EXPECT_LE(pair.worst_output(step), kNear);
      pair.step(step + 7);
      EXPECT_LE(pair.worst_output(step), kNear);
      EXPECT_LE(pair.worst_output(step + 1), kNear) << "with nothing to publish";
      EXPECT_EQ(pair.num_under_way(), 0);
      pair.sharded.begin_update();
    }
  });
}

// Unsharding by hand closes the window; whoever gathers by himself then must not get in the way of
// what is under way.
TEST_P(PublishUsageTest, AUnitUnshardedByHandIsCurrentAndGathersOfOnesOwnKeepTheOrder) {
  run([](Pair& pair) {
    const at::NoGradGuard no_grad;
    for (int step = 0; step < 3; ++step) {
      {
        const at::AutoGradMode grad(true);
        pair.step(step);
      }
      for (const int block : {1, kBlocks - 1, 0}) {
        const std::string name = "blocks." + std::to_string(block);
        pair.sharded.unshard(name);
        const at::Tensor& found = pair.model->blocks[static_cast<std::size_t>(block)]
                                      ->as<ProbedBlockImpl>()
                                      ->linear->weight;
        const at::Tensor& wanted = pair.oracle->blocks[static_cast<std::size_t>(block)]
                                       ->as<ProbedBlockImpl>()
                                       ->linear->weight;
        EXPECT_LE((found - wanted).abs().max().item<double>(), kNear) << name;
        if (is_late() && block == 1) {
          EXPECT_GT(pair.num_under_way(), 0);
        }
        if (block == 1) {
          EXPECT_GT(pair.sharded.clip_grad_norm_(1e9), 0.0);
        } else {
          EXPECT_LE(pair.worst_parameter(), kNear);
        }
        pair.sharded.reshard(name);
        EXPECT_EQ(pair.num_under_way(), 0) << "the write window is open";
      }
      EXPECT_LE(pair.worst_output(step), kNear);
    }
  });
}

TEST_P(PublishUsageTest, AUnitSkippedOnSomeRanksIsPublishedAllTheSame) {
  run([](Pair& pair) {
    for (int step = 0; step < 5; ++step) {
      pair.plain.zero_grad();
      pair.optimizer.zero_grad();
      const at::Tensor batch = make_inputs(8, 5, step);
      const auto skipped_on = [&](int rank) {
        return step == 0 || step == 3 ? -1 : rank == step % kRanks ? 1 : rank % 2 == 1 ? 0 : -1;
      };
      for (int rank = 0; rank < kRanks; ++rank) {
        pair.oracle->skip_block = skipped_on(rank);
        (loss_of(pair.oracle->forward(rows_of(batch, rank, kRanks))) / kRanks).backward();
      }
      pair.model->skip_block = skipped_on(pair.world->rank());
      pair.loss(step).backward();
      pair.update();
      // Nobody on these ranks needs what comes last.
      const bool is_short = pair.world->rank() == (step + 1) % kRanks;
      pair.oracle->skip_block = is_short ? kBlocks - 1 : -1;
      pair.model->skip_block = pair.oracle->skip_block;
      EXPECT_LE(pair.worst_output(step), kNear) << "step " << step;
      EXPECT_EQ(pair.num_under_way(), 0);
      EXPECT_LE(pair.worst_parameter(), kNear) << "step " << step;
    }
  });
}

TEST_P(PublishUsageTest, AForwardThatFailsAmongPublishesLeavesAWorkingModel) {
  run([](Pair& pair) {
    int most_under_way = 0;
    for (int attempt = 0; attempt < 4; ++attempt) {
      pair.step(attempt);
      int under_way = 0;
      *pair.model->visit = [&](int block) {
        under_way = pair.num_under_way();
        HS_CHECK(block != 1, "a test's failure");
      };
      const bool evaluates = attempt % 2 == 1;
      EXPECT_NE(
          thrown_by([&] {
            const at::AutoGradMode grad(!evaluates);
            (void)pair.loss(attempt);
          }).find("a test's failure"),
          std::string::npos
      );
      *pair.model->visit = nullptr;
      most_under_way = std::max(most_under_way, under_way);
      if (attempt >= 2) {
        EXPECT_LE(pair.worst_parameter(), kNear);  // gathers beside what is under way
      }
      if (attempt == 3) {
        EXPECT_LE(pair.worst_output(attempt), kNear);
        pair.sharded.begin_update();
      }
    }
    if (is_late()) {
      EXPECT_GT(most_under_way, 0);
    }
    pair.step(9);
    EXPECT_LE(pair.worst_parameter(), kNear);
    EXPECT_LE(pair.worst_output(0), kNear);
  });
}

// An evaluation publishes and fails; then comes the backward of a forward that ran before it.
TEST_P(PublishUsageTest, BackwardAfterAFailedEvaluationHasItsParameters) {
  run([](Pair& pair) {
    pair.step(0);
    pair.step(1);
    pair.plain.zero_grad();
    pair.optimizer.zero_grad();
    loss_of(pair.oracle->forward(make_inputs(8, 5, 2))).backward();
    const at::Tensor loss = pair.loss(2);
    const auto evaluate = [&](bool fails) {
      const at::NoGradGuard no_grad;
      *pair.model->visit = [&](int block) { HS_CHECK(!fails || block != 0, "a test's failure"); };
      EXPECT_EQ(thrown_by([&] { (void)pair.loss(3); }).empty(), !fails);
      *pair.model->visit = nullptr;
    };
    evaluate(/*fails=*/false);
    pair.sharded.reshard("blocks.0");  // nothing by hand: no effect
    evaluate(/*fails=*/true);
    loss.backward();
    pair.update();
    EXPECT_LE(pair.worst_parameter(), kNear);
  });
}

TEST_P(PublishUsageTest, AGraphOverOldValuesIsFoundOut) {
  run([](Pair& pair) {
    pair.step(0);
    pair.optimizer.zero_grad();
    const at::Tensor old = pair.loss(1);
    old.backward({}, /*retain_graph=*/true);
    pair.optimizer.step();
    const auto stale = [&] {
      return thrown_by([&] { old.backward(); }).find("modified by an inplace operation") !=
             std::string::npos;
    };
    {
      const at::NoGradGuard no_grad;
      (void)pair.loss(2);  // publishes
    }
    EXPECT_TRUE(stale());
    // From the moment of the publish on, not from its arrival.
    bool was_stale = false;
    const at::Tensor& last = pair.model->blocks[kBlocks - 1]->as<ProbedBlockImpl>()->linear->weight;
    const auto before = last._version();
    pair.sharded.zero_grad();
    *pair.model->visit = [&](int block) {
      was_stale = was_stale || (block == kRootVisit && last._version() > before);
    };
    (void)pair.loss(3);
    *pair.model->visit = nullptr;
    EXPECT_TRUE(was_stale);
  });
}

}  // namespace
}  // namespace hypershard::shard::test
