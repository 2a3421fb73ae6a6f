// A few gradient buffers serve many units: ranks that run ahead of one another must neither write
// into a buffer that is still read nor wait for each other in a circle.
#include <chrono>
#include <memory>
#include <random>
#include <thread>
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

/// Sleeps for up to 60 us in forward and in backward, if told to: another time on every rank.
class Delay {
 public:
  Delay(int rank, bool is_on) : random_(static_cast<std::uint64_t>(rank) + 17), is_on_(is_on) {}
  void pass() {
    if (is_on_ && random_() % 4 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % 60));
    }
  }

 private:
  std::mt19937_64 random_;
  bool is_on_;
};

struct BlockImpl : nn::Hookable<BlockImpl, at::Tensor(const at::Tensor&), torch::nn::Module> {
  explicit BlockImpl(std::shared_ptr<Delay> given) : delay(std::move(given)), linear(8, 8) {
    register_module("linear", linear);
  }
  at::Tensor forward_impl(const at::Tensor& x) {
    delay->pass();
    at::Tensor y = x + linear->forward(at::tanh(x));
    if (y.requires_grad()) {
      y.register_hook([delay = delay](const at::Tensor&) { delay->pass(); });
    }
    return y;
  }
  std::shared_ptr<Delay> delay;
  nn::Linear linear;
};
TORCH_MODULE(Block);

struct NetImpl : nn::Hookable<NetImpl, at::Tensor(const at::Tensor&), torch::nn::Module> {
  explicit NetImpl(const std::shared_ptr<Delay>& delay) {
    for (int i = 0; i < kBlocks; ++i) {
      Block block(delay);
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

/// Returns the parameters that rank 0 ends with.
std::vector<at::Tensor> train(int depth, bool delayed, testing::RankBackend backend, int steps) {
  std::vector<at::Tensor> ends;
  testing::run_ranks(
      kRanks,
      [&](const std::shared_ptr<comm::World>& world) {
        Net model(std::make_shared<Delay>(world->rank(), delayed));
        const comm::ProcessMesh mesh(
            world, layout::DeviceMesh({{"shard", kRanks}}, world->topology())
        );
        shard::FullyShardOptions options;
        options.units = {"blocks.*"};
        options.gradient_buffers = depth;
        const shard::ShardedModel sharded = shard::fully_shard(*model, mesh, options);
        torch::optim::SGD optimizer(sharded.update_tensors(), torch::optim::SGDOptions(0.05));
        for (int step = 0; step < steps; ++step) {
          const at::Tensor x =
              at::arange(24).mul(0.1).add(step * kRanks + world->rank()).cos().view({3, 8});
          model->forward(x).pow(2).mean().backward();
          optimizer.step();
          sharded.zero_grad();
        }
        for (const std::string& name : sharded.parameter_names()) {
          const at::Tensor whole = sharded.full_parameter(name);
          if (world->rank() == 0) {
            ends.push_back(whole);
          }
        }
      },
      {.backend = backend, .deadline_s = 100}
  );
  return ends;
}

TEST(GradientBuffersTest, RandomDelaysChangeNoBit) {
  // As many buffers as units and nobody late: no buffer is written a second time in a step.
  const std::vector<at::Tensor> expected =
      train(kBlocks, false, testing::RankBackend::kLocal, kSteps);
  for (const int depth : {1, 2, 3, 4}) {
    const auto found = train(depth, true, testing::RankBackend::kLocal, kSteps);
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(at::equal(found[i], expected[i])) << "depth " << depth << " parameter " << i;
    }
  }
}

TEST(GradientBuffersTest, LateCollectivesChangeNoBit) {
  constexpr int kFewSteps = 40;
  const auto expected = train(kBlocks, false, testing::RankBackend::kLocal, kFewSteps);
  for (const int depth : {1, 2, 4}) {
    const auto found = train(depth, true, testing::RankBackend::kDelayed, kFewSteps);
    for (std::size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(at::equal(found[i], expected[i])) << "depth " << depth << " parameter " << i;
    }
  }
}

}  // namespace
}  // namespace hypershard
