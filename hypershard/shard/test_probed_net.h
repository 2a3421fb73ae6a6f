// A model that tells when its units run, and a training loop whose publishes either overlap with
// the forward or are over before it: for the tests of publishing.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <torch/optim/adamw.h>

#include "hypershard/shard/engine.h"
#include "hypershard/shard/test_models.h"

namespace hypershard::shard::test {

inline constexpr std::int64_t kProbedDim = 16;
inline constexpr int kRootVisit = -1;

/// Called in the forward of each block with its number, and of the root before any block; or in the
/// backward of each block, before any gradient of its parameters is there.
using Visit = std::function<void(int block)>;

struct ProbedBlockImpl : nn::Hookable<ProbedBlockImpl, at::Tensor(at::Tensor), torch::nn::Module> {
  ProbedBlockImpl(int which, std::shared_ptr<Visit> on_forward, std::shared_ptr<Visit> on_backward)
      : number(which),
        visit(std::move(on_forward)),
        visit_backward(std::move(on_backward)),
        linear(kProbedDim, kProbedDim) {
    register_module("linear", linear);
  }
  at::Tensor forward_impl(const at::Tensor& x) {
    if (*visit) {
      (*visit)(number);
    }
    const at::Tensor inner = linear->forward(x);
    if (*visit_backward && inner.requires_grad()) {
      inner.register_hook([call = visit_backward, block = number](const at::Tensor&) {
        (*call)(block);
      });
    }
    return x + at::tanh(inner);
  }
  int number;
  std::shared_ptr<Visit> visit;
  std::shared_ptr<Visit> visit_backward;
  torch::nn::Linear linear;
};
TORCH_MODULE(ProbedBlock);

struct ProbedNetImpl : nn::Hookable<ProbedNetImpl, at::Tensor(at::Tensor), torch::nn::Module> {
  explicit ProbedNetImpl(int num_blocks, at::ScalarType dtype = at::kDouble, int memory_shift = 0)
      : visit(std::make_shared<Visit>()),
        visit_backward(std::make_shared<Visit>()),
        in(5, kProbedDim) {
    register_module("in", in);
    int number = 0;
    const auto make_block = [this] { return ProbedBlock(0, visit, visit_backward); };
    for (ProbedBlock& block : make_scattered(num_blocks, memory_shift, make_block)) {
      block->number = number++;
      blocks->push_back(block);
    }
    register_module("blocks", blocks);
    to(at::kDouble);
    fill_by_formula(*this);
    to(dtype);
  }
  at::Tensor forward_impl(const at::Tensor& x) {
    if (*visit) {
      (*visit)(kRootVisit);
    }
    at::Tensor h = in->forward(x);
    const int count = static_cast<int>(blocks->size());
    for (int i = 0; i < count; ++i) {
      const int number = last_first ? count - 1 - i : i;
      if (number != skip_block) {
        h = blocks[static_cast<std::size_t>(number)]->as<ProbedBlockImpl>()->forward(h);
      }
    }
    return h;
  }
  using torch::nn::Module::to;
  std::shared_ptr<Visit> visit;
  std::shared_ptr<Visit> visit_backward;
  torch::nn::Linear in;
  torch::nn::ModuleList blocks;
  int skip_block = -1;
  bool last_first = false;  ///< runs the blocks in reverse
};
TORCH_MODULE(ProbedNet);

/// Sleeps now and then, at other times on every rank.
class RandomSleep {
 public:
  explicit RandomSleep(int rank) : random_(static_cast<std::uint64_t>(rank) + 29) {}
  void pass(int most_us) {
    if (random_() % 4 == 0) {
      std::this_thread::sleep_for(
          std::chrono::microseconds(random_() % static_cast<std::uint64_t>(most_us))
      );
    }
  }

 private:
  std::mt19937_64 random_;
};

struct ProbedRun {
  FullyShardOptions options;
  int replicate = 1;
  int num_blocks = 4;
  int steps = 5;
  at::ScalarType dtype = at::kDouble;
  bool overlap = true;  ///< off: sync_runtime() before each forward, so that nothing is under way
  bool sleeps = false;  ///< now and then, in forwards, backwards and between steps
  int slow_rank = -1;   ///< sleeps long in the middle block
  bool slow_forward = false;  ///< in its forward, else in its backward
  int num_micro = 1;          ///< all but the last are summed inside the supernode only
};

/// The loss of each micro-batch, then every parameter: the same on all ranks but for the losses.
inline std::vector<at::Tensor> train_probed(
    const std::shared_ptr<comm::World>& world, const ProbedRun& run
) {
  ProbedNet model(run.num_blocks, run.dtype);
  const auto sleep = std::make_shared<RandomSleep>(world->rank());
  if (run.sleeps) {
    *model->visit = [sleep](int) { sleep->pass(60); };
    *model->visit_backward = [sleep](int) { sleep->pass(60); };
  }
  if (run.slow_rank == world->rank()) {
    *(run.slow_forward ? model->visit : model->visit_backward
    ) = [slow_block = run.num_blocks / 2](int block) {
      std::this_thread::sleep_for(std::chrono::milliseconds(block == slow_block ? 20 : 0));
    };
  }
  FullyShardOptions options = run.options;
  options.units = {"blocks.*"};
  const ShardedModel sharded = fully_shard(*model, make_mesh(world, run.replicate), options);
  torch::optim::AdamW optimizer(sharded.update_tensors(), torch::optim::AdamWOptions(0.01));
  std::vector<at::Tensor> found;
  for (int step = 0; step < run.steps; ++step) {
    if (run.sleeps) {
      sleep->pass(1000);  // the ranks come to the publish at different times
    }
    if (!run.overlap) {
      sharded.sync_runtime();
    }
    for (int micro = 0; micro < run.num_micro; ++micro) {
      sharded.set_requires_all_reduce(micro + 1 == run.num_micro);
      const at::Tensor batch =
          make_inputs(2 * world->size(), 5, step * run.num_micro + micro, run.dtype);
      const at::Tensor loss =
          loss_of(model->forward(rows_of(batch, world->rank(), world->size())).to(at::kDouble));
      loss.backward();
      found.push_back(loss.detach());
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  for (const std::string& name : sharded.parameter_names()) {
    found.push_back(sharded.full_parameter(name));
  }
  return found;
}

inline void expect_same_run(
    const std::vector<at::Tensor>& found,
    const std::vector<at::Tensor>& expected,
    const std::string& what
) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_TRUE(at::equal(found[i], expected[i])) << what << ", entry " << i;
  }
}

}  // namespace hypershard::shard::test
