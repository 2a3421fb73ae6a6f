// What becomes of parameters: tied, frozen and poisoned ones, and where their first values come
// from.
#include <cmath>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "hypershard/core/error.h"
#include "hypershard/shard/engine.h"
#include "hypershard/shard/test_models.h"

namespace hypershard::shard::test {
namespace {

using layout::Strategy;
using testing::RankBackend;

class EngineParametersTest : public ::testing::TestWithParam<RankBackend> {
 protected:
  void run(int ranks, const std::function<void(std::shared_ptr<comm::World>)>& body) {
    testing::run_ranks(ranks, body, {.backend = GetParam()});
  }
};
INSTANTIATE_TEST_SUITE_P(
    Backends,
    EngineParametersTest,
    ::testing::ValuesIn(all_backends()),
    [](const auto& each) { return testing::to_text(each.param); }
);

// One tensor in two modules of different units.
struct TiedImpl : nn::Hookable<TiedImpl, at::Tensor(at::Tensor), torch::nn::Module> {
  struct EndImpl : nn::Hookable<EndImpl, at::Tensor(at::Tensor), torch::nn::Module> {
    explicit EndImpl(at::Tensor w) { weight = register_parameter("weight", std::move(w)); }
    at::Tensor forward_impl(const at::Tensor& x) { return x.matmul(weight); }
    at::Tensor weight;
  };
  TiedImpl() {
    first = register_module(
        "first", std::make_shared<EndImpl>(at::arange(36, at::kDouble).sin().mul(0.3).view({6, 6}))
    );
    middle = register_module("middle", Block(6, 7));
    second = register_module("second", std::make_shared<EndImpl>(first->weight));
    middle->to(at::kDouble);
    fill_by_formula(*this);
  }
  at::Tensor forward_impl(const at::Tensor& x) {
    return second->forward(middle->forward(first->forward(x)));
  }
  std::shared_ptr<EndImpl> first;
  Block middle{nullptr};
  std::shared_ptr<EndImpl> second;
};
TORCH_MODULE(Tied);

TEST_P(EngineParametersTest, TiedParameterStaysOneTensorAcrossUnits) {
  run(2, [&](std::shared_ptr<comm::World> world) {
    Tied oracle;
    Tied model;
    FullyShardOptions options;
    options.units = {"first", "middle", "second"};
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), options);
    torch::optim::SGD plain(
        {oracle->first->weight,
         oracle->middle->a->weight,
         oracle->middle->a->bias,
         oracle->middle->b->weight,
         oracle->middle->b->bias},
        torch::optim::SGDOptions(0.02)
    );
    torch::optim::SGD optimizer(sharded.update_tensors(), torch::optim::SGDOptions(0.02));
    for (int step = 0; step < 3; ++step) {
      const at::Tensor batch = make_inputs(8, 6, step);
      plain.zero_grad();
      optimizer.zero_grad();
      loss_of(oracle->forward(batch)).backward();
      loss_of(model->forward(rows_of(batch, world->rank(), 2))).backward();
      plain.step();
      optimizer.step();
    }
    EXPECT_TRUE(model->first->weight.is_same(model->second->weight));
    EXPECT_LE(
        (sharded.full_parameter("first.weight") - oracle->first->weight).abs().max().item<double>(),
        1e-12
    );
    EXPECT_TRUE(
        at::equal(sharded.full_parameter("second.weight"), sharded.full_parameter("first.weight"))
    );
    EXPECT_EQ(sharded.parameter_names().size(), 5U);
  });
}

TEST_P(EngineParametersTest, FrozenParametersAreNotReducedAndMayBeUnfrozen) {
  run(2, [&](std::shared_ptr<comm::World> world) {
    Net oracle;
    Net model;
    const auto freeze = [](NetImpl& net, bool on) {
      net.blocks[1]->as<BlockImpl>()->a->weight.requires_grad_(!on);
    };
    freeze(*oracle, true);
    freeze(*model, true);
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    torch::optim::SGD plain(oracle->parameters(), torch::optim::SGDOptions(0.05));
    torch::optim::SGD optimizer(sharded.update_tensors(), torch::optim::SGDOptions(0.05));
    std::int64_t frozen_bytes = 0;
    for (int step = 0; step < 4; ++step) {
      if (step == 2) {
        freeze(*oracle, false);
        freeze(*model, false);
      }
      const at::Tensor batch = make_inputs(8, 5, step);
      plain.zero_grad();
      optimizer.zero_grad();
      loss_of(oracle->forward(batch)).backward();
      const auto before = sharded.counters().reduced_bytes;
      loss_of(model->forward(rows_of(batch, world->rank(), 2))).backward();
      const auto reduced = sharded.counters().reduced_bytes - before;
      if (step == 1) {
        frozen_bytes = reduced;
      } else if (step == 2) {
        EXPECT_GE(reduced, frozen_bytes + 6 * 7 * 8);
      }
      plain.step();
      optimizer.step();
    }
    for (const auto& item : oracle->named_parameters()) {
      EXPECT_LE(
          (sharded.full_parameter(item.key()) - item.value()).abs().max().item<double>(), 1e-12
      ) << item.key();
    }
  });
}

TEST_P(EngineParametersTest, FreezingPartOfAGroupIsRefusedByName) {
  run(2, [&](std::shared_ptr<comm::World> world) {
    Net model;
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    model->blocks[0]->as<BlockImpl>()->b->bias.requires_grad_(false);
    const std::string text = thrown_by([&] { (void)model->forward(make_inputs(2, 5, 0)); });
    EXPECT_NE(text.find("blocks.0"), std::string::npos) << text;
    EXPECT_NE(text.find("requires_grad"), std::string::npos) << text;
  });
}

// Pool buffers are NaN whenever nobody owns them; odd sizes make padding. No NaN may reach a
// gradient, a norm or a parameter.
TEST_P(EngineParametersTest, PoisonedBuffersNeverLeak) {
  run(3, [&](std::shared_ptr<comm::World> world) {
    Net oracle;
    Net model;
    FullyShardOptions options = block_units();
    options.reshard_debug = ReshardDebug::kNan;
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), options);
    torch::optim::AdamW plain(oracle->parameters(), torch::optim::AdamWOptions(0.01));
    torch::optim::AdamW optimizer(sharded.update_tensors(), torch::optim::AdamWOptions(0.01));
    for (int step = 0; step < 3; ++step) {
      const at::Tensor batch = make_inputs(12, 5, step);
      plain.zero_grad();
      optimizer.zero_grad();
      loss_of(oracle->forward(batch)).backward();
      loss_of(model->forward(rows_of(batch, world->rank(), 3))).backward();
      EXPECT_TRUE(std::isfinite(sharded.clip_grad_norm_(1e9)));
      plain.step();
      optimizer.step();
      EXPECT_EQ(sharded.find_non_finite(), "");
    }
    for (const auto& item : oracle->named_parameters()) {
      EXPECT_LE(
          (sharded.full_parameter(item.key()) - item.value()).abs().max().item<double>(), 1e-9
      ) << item.key();
    }
    for (const UpdateTensor& update : sharded.update_parameters()) {
      at::Tensor rest = update.tensor.clone();
      for (const UpdatePiece& piece : update.pieces) {
        rest.narrow(0, piece.offset, piece.range.numel()).zero_();
      }
      EXPECT_TRUE(at::equal(rest, at::zeros_like(rest))) << update.name << ": padding is not zero";
    }
  });
}

TEST_P(EngineParametersTest, SameSeedGivesTheSameWeightsOnEveryMesh) {
  const auto init = [](std::string_view name, at::IntArrayRef) {
    return name.find("bias") != std::string_view::npos ? nn::Init::constant(0.5)
                                                       : nn::Init::normal(0, 0.02);
  };
  const auto sharded_values =
      [&](const std::shared_ptr<comm::World>& world, Strategy strategy, int replicate) {
        Net model;
        for (const at::Tensor& param : model->parameters()) {
          param.unsafeGetTensorImpl()->shallow_copy_from(
              at::empty(param.sizes(), param.options().device(at::kMeta)).getIntrusivePtr()
          );
        }
        FullyShardOptions options = block_units();
        options.strategy = strategy;
        const ShardedModel sharded = fully_shard(*model, make_mesh(world, replicate), options);
        const std::string text = thrown_by([&] { (void)model->forward(make_inputs(2, 5, 0)); });
        EXPECT_NE(text.find("in.weight"), std::string::npos)
            << "a forward without values must name a parameter: " << text;
        sharded.initialize(init, 42);
        EXPECT_TRUE(at::isfinite(model->forward(make_inputs(2, 5, 0))).all().item<bool>());
        std::map<std::string, at::Tensor> values;
        for (const std::string& name : sharded.parameter_names()) {
          values[name] = sharded.full_parameter(name);
        }
        return values;
      };
  std::map<std::string, at::Tensor> alone;
  testing::run_ranks(1, [&](const std::shared_ptr<comm::World>& world) {
    alone = sharded_values(world, Strategy::kZero3, 1);
  });
  EXPECT_GT(alone.at("in.weight").std().item<double>(), 0.01);
  struct Shape {
    int ranks;
    int replicate;
    Strategy strategy;
  };
  for (const Shape shape :
       {Shape{2, 1, Strategy::kZero3},
        {4, 1, Strategy::kZero3},
        {4, 2, Strategy::kHsdp},
        {3, 1, Strategy::kDdp}}) {
    run(shape.ranks, [&](const std::shared_ptr<comm::World>& world) {
      for (const auto& [name, value] : sharded_values(world, shape.strategy, shape.replicate)) {
        EXPECT_TRUE(at::equal(value, alone.at(name))) << name << " on " << shape.ranks;
      }
    });
  }
}

TEST_P(EngineParametersTest, RanksWithOtherInitialValuesAreFoundOut) {
  run(2, [&](std::shared_ptr<comm::World> world) {
    const auto build = [&] {
      Net model;
      const at::NoGradGuard no_grad;
      if (world->rank() == 1) {
        model->blocks[2]->as<BlockImpl>()->a->bias.add_(1e-9);
      }
      return model;
    };
    Net checked = build();
    const std::string text =
        thrown_by([&] { (void)fully_shard(*checked, make_mesh(world), block_units()); });
    EXPECT_NE(text.find("'blocks.2.a.bias'"), std::string::npos) << text;
    EXPECT_NE(text.find("initial values between rank 0 and rank 1"), std::string::npos) << text;
    Net taken = build();
    FullyShardOptions options = block_units();
    options.initial_values = InitialValues::kBroadcast;
    const ShardedModel sharded = fully_shard(*taken, make_mesh(world), options);
    Net plain;
    EXPECT_TRUE(at::equal(
        sharded.full_parameter("blocks.2.a.bias"), plain->blocks[2]->as<BlockImpl>()->a->bias
    ));
  });
}

}  // namespace
}  // namespace hypershard::shard::test
