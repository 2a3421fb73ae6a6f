// The zero-copy path, seen from outside: the operators that a sharded step runs move no more than
// those of the plain model, and the engine's own counters say the same.
#include <map>
#include <memory>
#include <string>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/adamw.h>

#include "hypershard/model/gpt.h"
#include "hypershard/nn/gradient_slot.h"
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

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// x * scale, as a user writes a layer that has heard of gradient slots.
struct ScaleFunction : torch::autograd::Function<ScaleFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& scale) {
    ctx->save_for_backward({x, scale});
    return x * scale;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor& scale = saved[1];
    const at::Tensor by_row = grads[0] * saved[0];
    const auto slot = nn::slot_of(scale);
    auto claim = slot ? slot->claim() : nn::GradientSlot::Claim{};
    at::Tensor plain;
    if (!claim.destination.defined()) {
      plain = by_row.sum(0);
    } else if (claim.overwrite) {
      at::sum_out(claim.destination, by_row, 0, /*keepdim=*/false);
    } else {
      claim.destination.add_(by_row.sum(0));
    }
    return {grads[0] * scale, plain};
  }
};

constexpr std::int64_t kWidth = 6;

struct ScaleImpl : nn::Hookable<ScaleImpl, at::Tensor(const at::Tensor&), torch::nn::Module> {
  explicit ScaleImpl(int number)
      : scale(register_parameter("scale", at::arange(kWidth).add(number).mul(0.3).cos())) {}
  at::Tensor forward_impl(const at::Tensor& x) {
    // Twice: the second use adds to what the first has written.
    return ScaleFunction::apply(at::tanh(ScaleFunction::apply(x, scale)), scale);
  }
  at::Tensor scale;
};
TORCH_MODULE(Scale);

struct ScalesImpl : nn::Hookable<ScalesImpl, at::Tensor(const at::Tensor&), torch::nn::Module> {
  ScalesImpl() {
    for (int i = 0; i < 3; ++i) {
      layers->push_back(Scale(i));
    }
    register_module("layers", layers);
  }
  at::Tensor forward_impl(const at::Tensor& x) {
    at::Tensor y = x;
    for (const auto& layer : *layers) {
      y = layer->as<ScaleImpl>()->forward(y);
    }
    return y;
  }
  torch::nn::ModuleList layers;
};
TORCH_MODULE(Scales);

constexpr std::int64_t kScaleRows = 8;

at::Tensor scale_rows() {
  return at::arange(kScaleRows * kWidth).mul(0.17).sin().view({kScaleRows, kWidth});
}

/// Gradients of the result: a loss would move scalars of its own.
at::Tensor scale_weights() {
  return at::arange(kScaleRows * kWidth).mul(0.23).cos().view({kScaleRows, kWidth});
}

TEST_P(ZeroCopyTest, AUsersLayerWritesIntoItsSlot) {
  testing::run_ranks(
      2,
      [](const std::shared_ptr<comm::World>& world) {
        Scales plain;
        const at::Tensor rows = scale_rows();
        const at::Tensor weights = scale_weights();
        plain->forward(rows).backward(weights);
        const comm::ProcessMesh mesh(
            world, layout::DeviceMesh({{"shard", world->size()}}, world->topology())
        );
        Scales model;
        shard::FullyShardOptions options;
        options.units = {"layers.*"};
        const shard::ShardedModel sharded = shard::fully_shard(*model, mesh, options);
        constexpr std::int64_t kCount = kScaleRows / 4;
        const auto step = [&] {
          for (int micro = 0; micro < 2; ++micro) {
            sharded.set_requires_gradient_sync(micro == 1);
            const std::int64_t first = (micro * 2 + world->rank()) * kCount;
            model->forward(rows.narrow(0, first, kCount))
                .backward(weights.narrow(0, first, kCount));
          }
        };
        step();  // ranks compare the order of units
        sharded.zero_grad();
        sharded.reset_counters();
        const Moves moves = moves_of(step);
        EXPECT_FALSE(exceeds(moves, {})) << to_text(moves);
        EXPECT_EQ(sharded.counters().copied_bytes, 0);
        // The second use, and both of the second micro-batch.
        EXPECT_EQ(sharded.counters().accumulated_bytes, 3 * 3 * kWidth * 4);
        for (const auto& item : plain->named_parameters()) {
          const at::Tensor found = sharded.full_gradient(item.key());
          ASSERT_TRUE(found.defined()) << item.key();
          const at::Tensor mean = item.value().grad() / world->size();
          EXPECT_TRUE(at::allclose(found, mean, 1e-5, 1e-8)) << item.key();
        }
      },
      {.backend = GetParam()}
  );
}

}  // namespace
}  // namespace hypershard
