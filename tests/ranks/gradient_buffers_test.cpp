// A few gradient buffers serve many units: ranks that run ahead of one another must neither write
// into a buffer that is still read nor wait for each other in a circle.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/sgd.h>

#include "hypershard/nn/linear.h"
#include "hypershard/shard/fully_shard.h"
#include "hypershard/testing/run_ranks.h"

namespace hypershard {
namespace {

constexpr int kBlocks = 6;
constexpr int kRanks = 4;
constexpr int kSteps = 500;
constexpr int kDepths[] = {1, 2, 3, 4};

/// What a rank does between units beside computing.
class Pace {
 public:
  virtual ~Pace() = default;
  virtual void forward() {}
  /// Called when the backward of each unit begins, and after that of the last.
  virtual void backward() {}
};

/// Sleeps for up to 60 us now and then: at another time on every rank.
class RandomPace : public Pace {
 public:
  explicit RandomPace(int rank) : random_(static_cast<std::uint64_t>(rank) + 17) {}
  void forward() override { pass(); }
  void backward() override { pass(); }

 private:
  void pass() {
    if (random_() % 4 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % 60));
    }
  }

  std::mt19937_64 random_;
};

/// Waits until every rank is through with the unit.
class MeetingPace : public Pace {
 public:
  explicit MeetingPace(comm::World& world) {
    std::vector<int> everyone(static_cast<std::size_t>(world.size()));
    std::iota(everyone.begin(), everyone.end(), 0);
    ranks_ = world.communicator("meeting", everyone);
  }
  void backward() override { ranks_->barrier()->wait(); }

 private:
  std::shared_ptr<comm::Communicator> ranks_;
};

/// How many units each rank has begun to run backward.
using Progress = std::array<std::atomic<int>, kRanks>;

/// One rank takes milliseconds for each unit, so that the others run ahead as far as they may.
class LatePace : public Pace {
 public:
  LatePace(Progress& begun, int rank, int late) : begun_(begun), rank_(rank), late_(late) {}
  void backward() override {
    const int mine = ++begun_[static_cast<std::size_t>(rank_)];
    if (rank_ == late_) {
      std::this_thread::sleep_for(std::chrono::milliseconds(4));
    } else {
      lead_ = std::max(lead_, mine - begun_[static_cast<std::size_t>(late_)]);
    }
  }
  /// Units that this rank was ahead of the late one, at most.
  int lead() const { return lead_; }

 private:
  Progress& begun_;
  int rank_;
  int late_;
  int lead_ = 0;
};

struct BlockImpl : nn::Hookable<BlockImpl, at::Tensor(const at::Tensor&), torch::nn::Module> {
  explicit BlockImpl(std::shared_ptr<Pace> given) : pace(std::move(given)), linear(8, 8) {
    register_module("linear", linear);
  }
  at::Tensor forward_impl(const at::Tensor& x) {
    pace->forward();
    at::Tensor y = x + linear->forward(at::tanh(x));
    if (y.requires_grad()) {
      y.register_hook([pace = pace](const at::Tensor&) { pace->backward(); });
    }
    return y;
  }
  std::shared_ptr<Pace> pace;
  nn::Linear linear;
};
TORCH_MODULE(Block);

struct NetImpl : nn::Hookable<NetImpl, at::Tensor(const at::Tensor&), torch::nn::Module> {
  explicit NetImpl(const std::shared_ptr<Pace>& pace) {
    for (int i = 0; i < kBlocks; ++i) {
      Block block(pace);
      const at::NoGradGuard no_grad;
      block->linear->weight.copy_(at::arange(64).mul(0.37).add(i).sin().mul(0.2).view({8, 8}));
      blocks->push_back(block);
    }
    register_module("blocks", blocks);
  }
  at::Tensor forward_impl(const at::Tensor& x) {
    at::Tensor y = x;
    for (const auto& block : *blocks) {
      y = block->as<BlockImpl>()->forward(y);
    }
    return y;
  }
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(Net);

using Parameters = std::vector<at::Tensor>;

/// Returns the parameters that a model ends with.
Parameters train(
    const std::shared_ptr<comm::World>& world,
    int depth,
    const std::shared_ptr<Pace>& pace,
    int steps
) {
  Net model(pace);
  const comm::ProcessMesh mesh(world, layout::DeviceMesh({{"shard", kRanks}}, world->topology()));
  shard::FullyShardOptions options;
  options.units = {"blocks.*"};
  options.gradient_buffers = depth;
  const shard::ShardedModel sharded = shard::fully_shard(*model, mesh, options);
  torch::optim::SGD optimizer(sharded.update_tensors(), torch::optim::SGDOptions(0.05));
  for (int step = 0; step < steps; ++step) {
    const at::Tensor x =
        at::arange(24).mul(0.1).add(step * kRanks + world->rank()).cos().view({3, 8});
    model->forward(x).pow(2).mean().backward();
    pace->backward();
    optimizer.step();
    sharded.zero_grad();
  }
  Parameters ends;
  for (const std::string& name : sharded.parameter_names()) {
    ends.push_back(sharded.full_parameter(name));
  }
  return ends;
}

/// The same where nothing can go wrong: no buffer is written a second time in a step, and nobody
/// begins a unit before all are through with the one before.
Parameters train_in_step(const std::shared_ptr<comm::World>& world, int steps) {
  return train(world, kBlocks, std::make_shared<MeetingPace>(*world), steps);
}

void expect_same_bits(const Parameters& found, const Parameters& expected, const std::string& how) {
  ASSERT_EQ(found.size(), expected.size()) << how;
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_TRUE(at::equal(found[i], expected[i])) << how << " parameter " << i;
  }
}

class GradientBuffersTest : public ::testing::TestWithParam<testing::RankBackend> {};
INSTANTIATE_TEST_SUITE_P(
    Shared,
    GradientBuffersTest,
    ::testing::Values(testing::RankBackend::kLocal, testing::RankBackend::kShm),
    [](const auto& each) { return testing::to_text(each.param); }
);

TEST_P(GradientBuffersTest, RandomDelaysChangeNoBit) {
  testing::run_ranks(
      kRanks,
      [](const std::shared_ptr<comm::World>& world) {
        const Parameters expected = train_in_step(world, kSteps);
        for (const int depth : kDepths) {
          const auto pace = std::make_shared<RandomPace>(world->rank());
          expect_same_bits(
              train(world, depth, pace, kSteps), expected, "depth " + std::to_string(depth)
          );
        }
      },
      {.backend = GetParam(), .deadline_s = 150}
  );
}

TEST_P(GradientBuffersTest, ARankThatIsLateInEveryUnitChangesNoBit) {
  constexpr int kFewSteps = 4;
  Progress begun{};
  testing::run_ranks(
      kRanks,
      [&begun](const std::shared_ptr<comm::World>& world) {
        const Parameters expected = train_in_step(world, kFewSteps);
        for (int late = 0; late < kRanks; ++late) {
          for (const int depth : kDepths) {
            const auto pace = std::make_shared<LatePace>(begun, world->rank(), late);
            const std::string how =
                "depth " + std::to_string(depth) + " rank " + std::to_string(late) + " late";
            expect_same_bits(train(world, depth, pace, kFewSteps), expected, how);
            // Processes do not see each other's progress.
            if (GetParam() == testing::RankBackend::kLocal && world->rank() != late) {
              EXPECT_GE(pace->lead(), depth) << how << ": rank " << world->rank() << " waited";
            }
          }
        }
      },
      {.backend = GetParam(), .deadline_s = 150}
  );
}

TEST(GradientBuffersLateTest, LateCollectivesChangeNoBit) {
  constexpr int kFewSteps = 40;
  Parameters expected;
  testing::run_ranks(kRanks, [&](const std::shared_ptr<comm::World>& world) {
    Parameters ends = train_in_step(world, kFewSteps);
    if (world->rank() == 0) {
      expected = std::move(ends);
    }
  });
  testing::run_ranks(
      kRanks,
      [&](const std::shared_ptr<comm::World>& world) {
        for (const int depth : kDepths) {
          expect_same_bits(
              train(world, depth, std::make_shared<Pace>(), kFewSteps),
              expected,
              "depth " + std::to_string(depth)
          );
        }
      },
      {.backend = testing::RankBackend::kDelayed, .deadline_s = 100}
  );
}

}  // namespace
}  // namespace hypershard
