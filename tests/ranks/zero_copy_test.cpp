// The zero-copy path, seen from outside: the operators that a sharded step runs move no more than
// those of the plain model, and the engine's own counters say the same.
#include <map>
#include <memory>
#include <string>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include "hypershard/model/gpt.h"
#include "hypershard/nn/hooks.h"
#include "hypershard/optim/adamw.h"
#include "hypershard/shard/fully_shard.h"
#include "hypershard/testing/run_ranks.h"

namespace hypershard {
namespace {

using testing::RankBackend;

/// How often each operator ran that moves or casts data.
using Moves = std::map<std::string, int>;

// Callbacks have no argument of ours; each rank is a thread.
thread_local Moves* current_moves = nullptr;

std::unique_ptr<at::ObserverContext> count_move(const at::RecordFunction& function) {
  static constexpr const char* kMoving[] = {
      "aten::copy_", "aten::clone", "aten::cat", "aten::_to_copy", "aten::stack", "aten::_copy_from"
  };
  for (const char* name : kMoving) {
    if (current_moves != nullptr && std::string(function.name()) == name) {
      ++(*current_moves)[name];
    }
  }
  return nullptr;
}

template <class Body>
Moves moves_of(const Body& body) {
  Moves moves;
  current_moves = &moves;
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(count_move).scopes({at::RecordScope::FUNCTION})
  );
  body();
  at::removeCallback(handle);
  current_moves = nullptr;
  return moves;
}

std::string to_text(const Moves& moves) {
  std::string text;
  for (const auto& [name, count] : moves) {
    text += name + " x" + std::to_string(count) + " ";
  }
  return text.empty() ? "none" : text;
}

/// Whether `moves` has more of anything than `allowed`.
bool exceeds(const Moves& moves, const Moves& allowed) {
  for (const auto& [name, count] : moves) {
    const auto found = allowed.find(name);
    if (count > (found == allowed.end() ? 0 : found->second)) {
      return true;
    }
  }
  return false;
}

const model::GptConfig kShape{
    .vocab_size = 64, .num_layers = 3, .dim = 32, .num_heads = 2, .max_sequence = 16
};

at::Tensor tokens(int rank) {
  return at::arange(34, at::kLong).mul(7).add(rank).remainder(64).view({2, 17});
}

class ZeroCopyTest : public ::testing::TestWithParam<RankBackend> {};
INSTANTIATE_TEST_SUITE_P(
    Shared,
    ZeroCopyTest,
    ::testing::Values(RankBackend::kLocal, RankBackend::kShm),
    [](const auto& each) { return testing::to_text(each.param); }
);

Moves plain_moves() {
  model::Gpt model(kShape);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.01));
  const auto step = [&] {
    optimizer.zero_grad();
    const at::Tensor batch = tokens(0);
    model->loss(batch.narrow(1, 0, 16), batch.narrow(1, 1, 16)).backward();
    optimizer.step();
  };
  step();  // makes tables and optimizer state
  return moves_of(step);
}

TEST_P(ZeroCopyTest, AStepMovesNoMoreThanThePlainModels) {
  const Moves plain = plain_moves();
  for (const layout::Strategy strategy :
       {layout::Strategy::kDdp, layout::Strategy::kZero1, layout::Strategy::kZero3}) {
    testing::run_ranks(
        2,
        [&](const std::shared_ptr<comm::World>& world) {
          const comm::ProcessMesh mesh(
              world, layout::DeviceMesh({{"shard", world->size()}}, world->topology())
          );
          model::Gpt model(kShape);
          shard::FullyShardOptions options;
          options.strategy = strategy;
          options.units = {"blocks.*"};
          const shard::ShardedModel sharded = shard::fully_shard(*model, mesh, options);
          optim::AdamW optimizer(sharded, {.lr = 0.01});
          const auto step = [&] {
            sharded.zero_grad();
            const at::Tensor batch = tokens(world->rank());
            model->loss(batch.narrow(1, 0, 16), batch.narrow(1, 1, 16)).backward();
            optimizer.step();
          };
          step();
          const shard::Counters before = sharded.counters();
          const Moves moves = moves_of(step);
          const shard::Counters& after = sharded.counters();
          EXPECT_FALSE(exceeds(moves, plain))
              << to_text(strategy) << ": " << to_text(moves) << "; plain: " << to_text(plain);
          EXPECT_EQ(after.copied_bytes, before.copied_bytes);
          EXPECT_EQ(after.accumulated_bytes, before.accumulated_bytes);
          EXPECT_GT(after.reduced_bytes, before.reduced_bytes);
          EXPECT_EQ(after.gathered_bytes, before.gathered_bytes);
        },
        {.backend = GetParam()}
    );
  }
}

// The same trace sees the copies that there are: a layer that knows no gradient buffer hands its
// gradient to autograd, which has to move it there.
TEST(ZeroCopyTraceTest, SeesWhatPlainLayersMove) {
  testing::run_ranks(2, [](const std::shared_ptr<comm::World>& world) {
    const comm::ProcessMesh mesh(
        world, layout::DeviceMesh({{"shard", world->size()}}, world->topology())
    );
    torch::nn::ModuleHolder<nn::Hooked<torch::nn::LinearImpl>> model(8, 8);
    shard::FullyShardOptions options;
    options.initial_values = shard::InitialValues::kBroadcast;
    const shard::ShardedModel sharded = shard::fully_shard(*model, mesh, options);
    const Moves moves = moves_of([&] { model->forward(at::ones({2, 8})).sum().backward(); });
    EXPECT_TRUE(exceeds(moves, {})) << to_text(moves);
    EXPECT_EQ(sharded.counters().copied_bytes, (8 * 8 + 8) * 4);
  });
}

}  // namespace
}  // namespace hypershard
