// Behaviour of the engine where neighbouring systems are known to fail: each test states what must
// hold instead.
#include "hypershard/shard/engine.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "hypershard/core/error.h"
#include "hypershard/shard/test_models.h"

namespace hypershard::shard::test {
namespace {

using layout::Strategy;
using testing::RankBackend;

class EngineTest : public ::testing::TestWithParam<RankBackend> {
 protected:
  void run(int ranks, const std::function<void(std::shared_ptr<comm::World>)>& body) {
    testing::run_ranks(ranks, body, {.backend = GetParam()});
  }
};
INSTANTIATE_TEST_SUITE_P(
    Backends,
    EngineTest,
    ::testing::ValuesIn(all_backends()),
    [](const auto& each) { return testing::to_text(each.param); }
);

// More ranks than rows: 6, 5, 3 and 1 output rows on 4 ranks, three steps.
TEST_P(EngineTest, FewRowsOnManyRanksTrainAsOnOne) {
  for (const std::int64_t rows : {6, 5, 3, 1}) {
    torch::nn::Linear reference(4, rows);
    fill_by_formula(*reference);
    torch::optim::SGD plain(reference->parameters(), torch::optim::SGDOptions(0.1));
    for (int step = 0; step < 3; ++step) {
      plain.zero_grad();
      loss_of(reference->forward(make_inputs(8, 4, step, at::kFloat))).backward();
      plain.step();
    }
    run(4, [&](std::shared_ptr<comm::World> world) {
      torch::nn::ModuleHolder<nn::Hooked<torch::nn::LinearImpl>> model(4, rows);
      fill_by_formula(*model);
      const ShardedModel sharded = fully_shard(*model, make_mesh(world), {});
      torch::optim::SGD optimizer(sharded.update_tensors(), torch::optim::SGDOptions(0.1));
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        loss_of(model->forward(rows_of(make_inputs(8, 4, step, at::kFloat), world->rank(), 4)))
            .backward();
        optimizer.step();
      }
      EXPECT_LE(
          (sharded.full_parameter("weight") - reference->weight).abs().max().item<float>(), 1e-5F
      );
    });
  }
}

struct ScaleImpl : nn::Hookable<ScaleImpl, at::Tensor(at::Tensor), torch::nn::Module> {
  ScaleImpl() { w = register_parameter("w", at::zeros({5}, at::kDouble)); }
  at::Tensor forward_impl(const at::Tensor& x) { return (w * x).sum(); }
  at::Tensor w;
};
TORCH_MODULE(Scale);

// Rank r has gradient r + 1 everywhere: the mean is exact for every world and back end; so is a
// divisor of one's own.
TEST_P(EngineTest, GradientIsExactlyTheMean) {
  for (const int ranks : {1, 2, 3, 4}) {
    run(ranks, [&](std::shared_ptr<comm::World> world) {
      Scale model;
      ShardedModel sharded = fully_shard(*model, make_mesh(world), {});
      const at::Tensor x = at::full({5}, world->rank() + 1.0, at::kDouble);
      model->forward(x).backward();
      EXPECT_TRUE(
          at::equal(sharded.full_gradient("w"), at::full({5}, (ranks + 1) / 2.0, at::kDouble))
      );
      sharded.zero_grad();
      sharded.set_gradient_divide_factor(8);
      model->forward(x).backward();
      EXPECT_TRUE(at::equal(
          sharded.full_gradient("w"), at::full({5}, ranks * (ranks + 1) / 16.0, at::kDouble)
      ));
    });
  }
}

TEST_P(EngineTest, OptimizerBuiltBeforeShardingThrowsNamingTheParameter) {
  run(2, [&](std::shared_ptr<comm::World> world) {
    Net model;
    torch::optim::SGD early(model->parameters(), torch::optim::SGDOptions(0.1));
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    loss_of(model->forward(rows_of(make_inputs(8, 5, 0), world->rank(), 2))).backward();
    const std::string text = thrown_by([&] { early.step(); });
    EXPECT_NE(text.find("in.weight"), std::string::npos) << text;
    EXPECT_NE(text.find("update_parameters()"), std::string::npos) << text;
  });
}

// One rank skips a whole unit: no hang, zeros from the rank that skipped.
TEST_P(EngineTest, UnitSkippedOnOneRankContributesZeros) {
  run(2, [&](std::shared_ptr<comm::World> world) {
    const int rank = world->rank();
    Net oracle;
    Net model;
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    for (int step = 0; step < 3; ++step) {
      sharded.zero_grad();
      const at::Tensor batch = make_inputs(8, 5, step);
      const int skipped = step == 1 ? -1 : 1;
      oracle->zero_grad();
      for (int r = 0; r < 2; ++r) {
        oracle->skip_block = r == 1 ? skipped : -1;
        (loss_of(oracle->forward(rows_of(batch, r, 2))) / 2).backward();
      }
      std::map<std::string, at::Tensor> expected;
      for (const auto& item : oracle->named_parameters()) {
        expected[item.key()] = item.value().grad().clone();
      }
      model->skip_block = rank == 1 ? skipped : -1;
      loss_of(model->forward(rows_of(batch, rank, 2))).backward();
      EXPECT_LE(worst_gradient(sharded, expected), 1e-12) << "step " << step;
    }
  });
}

// Three micro-batches on a 2x2 mesh: full reduction each, none until the last, inside `shard` only
// until the last.
TEST_P(EngineTest, AccumulationModesAgreeAndCountTheirCollectives) {
  run(4, [&](std::shared_ptr<comm::World> world) {
    const int rank = world->rank();
    for (const int mode : {0, 1, 2}) {
      Net oracle;
      Net model;
      FullyShardOptions options = block_units();
      options.strategy = Strategy::kHsdp;
      const comm::ProcessMesh mesh = make_mesh(world, 2);
      ShardedModel sharded = fully_shard(*model, mesh, options);
      torch::optim::SGD plain(oracle->parameters(), torch::optim::SGDOptions(0.05));
      torch::optim::SGD optimizer(sharded.update_tensors(), torch::optim::SGDOptions(0.05));
      comm::CollectiveLog& across = sharded.engine().parallel().summed.front().reduce->log();
      comm::CollectiveLog& inside = sharded.engine().parallel().cuts.front().reduce->log();
      for (int step = 0; step < 3; ++step) {
        const at::Tensor batch = make_inputs(24, 5, step);
        plain.zero_grad();
        loss_of(oracle->forward(batch)).backward();
        plain.step();
        optimizer.zero_grad();
        const auto across_before = across.count(comm::Op::kAllReduce);
        const auto inside_before = inside.count(comm::Op::kReduceScatter);
        for (int micro = 0; micro < 3; ++micro) {
          const bool last = micro == 2;
          sharded.set_requires_gradient_sync(mode != 1 || last);
          sharded.set_requires_all_reduce(mode != 2 || last);
          (loss_of(model->forward(rows_of(batch.narrow(0, 8 * micro, 8), rank, 4))) / 3).backward();
        }
        constexpr int kUnits = 4;
        EXPECT_EQ(across.count(comm::Op::kAllReduce) - across_before, kUnits * (mode == 0 ? 3 : 1));
        EXPECT_EQ(
            inside.count(comm::Op::kReduceScatter) - inside_before, kUnits * (mode == 1 ? 1 : 3)
        );
        optimizer.step();
      }
      for (const auto& item : oracle->named_parameters()) {
        EXPECT_LE(
            (sharded.full_parameter(item.key()) - item.value()).abs().max().item<double>(), 1e-12
        ) << item.key()
          << " mode " << mode;
      }
    }
  });
}

// Six equal layers with clearly different gradients, at several depths of buffers: each keeps its
// own.
TEST_P(EngineTest, EqualLayersKeepTheirOwnGradients) {
  for (const int depth : {1, 2, 3, 6}) {
    run(4, [&](std::shared_ptr<comm::World> world) {
      const NetOptions shape{.num_blocks = 6};
      Net oracle(shape);
      Net model(shape);
      FullyShardOptions options = block_units();
      options.strategy = Strategy::kHsdp;
      options.gradient_buffers = depth;
      const ShardedModel sharded = fully_shard(*model, make_mesh(world, 2), options);
      for (int step = 0; step < 2; ++step) {
        sharded.zero_grad();
        const at::Tensor batch = make_inputs(8, 5, step);
        const auto expected =
            reference_gradients([&] { return loss_of(oracle->forward(batch)); }, *oracle);
        loss_of(model->forward(rows_of(batch, world->rank(), 4))).backward();
        EXPECT_LE(worst_gradient(sharded, expected), 1e-12);
      }
    });
  }
}

// A unit returns a view (or a nest of tensors) and the caller edits it in place.
struct ViewBlockImpl : nn::Hookable<
                           ViewBlockImpl,
                           std::tuple<at::Tensor, std::vector<at::Tensor>>(at::Tensor),
                           torch::nn::Module> {
  ViewBlockImpl() : a(6, 6) { register_module("a", a); }
  std::tuple<at::Tensor, std::vector<at::Tensor>> forward_impl(const at::Tensor& x) {
    const at::Tensor y = a->forward(x);
    return {y.view({-1}), {y.transpose(0, 1)}};
  }
  torch::nn::Linear a;
};
TORCH_MODULE(ViewBlock);
struct ViewNetImpl : nn::Hookable<ViewNetImpl, at::Tensor(at::Tensor), torch::nn::Module> {
  ViewNetImpl() {
    register_module("block", block);
    fill_by_formula(*this);
  }
  at::Tensor forward_impl(const at::Tensor& x) {
    auto [flat, nested] = block->forward(x);
    flat.add_(1.0);
    return (flat.view({-1, 6}).pow(2) + nested[0].transpose(0, 1)).sum(1).mean();
  }
  ViewBlock block;
};
TORCH_MODULE(ViewNet);

TEST_P(EngineTest, ViewOutputEditedInPlaceStillReduces) {
  run(2, [&](std::shared_ptr<comm::World> world) {
    ViewNet oracle;
    ViewNet model;
    oracle->to(at::kDouble);
    model->to(at::kDouble);
    FullyShardOptions options;
    options.units = {"block"};
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), options);
    const at::Tensor batch = make_inputs(4, 6, 0);
    const auto expected = reference_gradients([&] { return oracle->forward(batch); }, *oracle);
    model->forward(rows_of(batch, world->rank(), 2)).backward();
    EXPECT_LE(worst_gradient(sharded, expected), 1e-12);
  });
}

// Norms 1, 2, infinity and a half, three ranks, the largest gradient where it may; also all zero,
// and NaN.
TEST_P(EngineTest, ClippingEqualsTheReference) {
  run(3, [&](std::shared_ptr<comm::World> world) {
    for (const double p : {1.0, 2.0, 0.5, std::numeric_limits<double>::infinity()}) {
      Net oracle;
      Net model;
      const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
      const at::Tensor batch = make_inputs(12, 5, 0);
      auto expected = reference_gradients([&] { return loss_of(oracle->forward(batch)); }, *oracle);
      loss_of(model->forward(rows_of(batch, world->rank(), 3))).backward();
      std::vector<at::Tensor> flat;
      for (const auto& [name, gradient] : expected) {
        flat.push_back(gradient.reshape({-1}));
      }
      const double norm = at::cat(flat).norm(p).item<double>();
      const double max_norm = norm / 3;
      EXPECT_NEAR(sharded.clip_grad_norm_(max_norm, p), norm, 1e-11 * norm) << p;
      for (auto& [name, gradient] : expected) {
        gradient.mul_(max_norm / (norm + 1e-6));
      }
      EXPECT_LE(worst_gradient(sharded, expected), 1e-12) << p;
      EXPECT_NEAR(sharded.clip_grad_norm_(10 * norm, p), max_norm, 1e-5 * norm)
          << p;  // below the bound: unchanged
      for (const UpdateTensor& update : sharded.update_parameters()) {
        update.tensor.grad().zero_();
      }
      EXPECT_EQ(sharded.clip_grad_norm_(1.0, p), 0.0);
      if (world->rank() == 2) {
        sharded.update_tensors()[0].grad().fill_(std::nan(""));
      }
      EXPECT_TRUE(std::isnan(sharded.clip_grad_norm_(1.0, p))) << p;
      EXPECT_NE(sharded.find_non_finite().find("(gradient) on rank 2"), std::string::npos)
          << sharded.find_non_finite();
    }
  });
}

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

TEST_P(EngineTest, TiedParameterStaysOneTensorAcrossUnits) {
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

TEST_P(EngineTest, FrozenParametersAreNotReducedAndMayBeUnfrozen) {
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

TEST_P(EngineTest, FreezingPartOfAGroupIsRefusedByName) {
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
TEST_P(EngineTest, PoisonedBuffersNeverLeak) {
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

TEST_P(EngineTest, CollectivesComeInTheSameOrderOnAllRanks) {
  run(3, [&](std::shared_ptr<comm::World> world) {
    // Shuffled memory order: modules of another shape are built between the ranks' models.
    std::vector<Net> noise(static_cast<std::size_t>(world->rank() * 3));
    Net model;
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    for (int step = 0; step < 2; ++step) {
      loss_of(model->forward(rows_of(make_inputs(12, 5, step), world->rank(), 3))).backward();
    }
    const DataAxis& axis = sharded.engine().parallel().cuts.front();
    for (comm::Communicator* each : {axis.gather.get(), axis.reduce.get()}) {
      at::Tensor mine = at::tensor(
          {static_cast<std::int64_t>(each->log().size()),
           static_cast<std::int64_t>(each->log().hash())},
          at::kLong
      );
      at::Tensor all = at::empty({3, 2}, at::kLong);
      world->world_communicator()->all_gather(all.view({-1}), mine)->wait_released();
      EXPECT_TRUE(at::equal(all[0], all[1]) && at::equal(all[0], all[2]));
    }
  });
}

TEST_P(EngineTest, SameSeedGivesTheSameWeightsOnEveryMesh) {
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

TEST_P(EngineTest, RanksWithOtherInitialValuesAreFoundOut) {
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

TEST_P(EngineTest, RecomputeGivesTheSameGradients) {
  run(2, [&](std::shared_ptr<comm::World> world) {
    Net oracle;
    Net model(NetOptions{.recompute = true});
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    for (int step = 0; step < 3; ++step) {
      sharded.zero_grad();
      const at::Tensor batch = make_inputs(8, 5, step);
      const auto expected =
          reference_gradients([&] { return loss_of(oracle->forward(batch)); }, *oracle);
      loss_of(model->forward(rows_of(batch, world->rank(), 2))).backward();
      EXPECT_LE(worst_gradient(sharded, expected), 1e-12) << step;
    }
  });
}

// The whole model inside one segment, a unit used twice, a segment inside a unit.
TEST_P(EngineTest, UnusualRecomputeGivesTheSameGradients) {
  run(2, [&](std::shared_ptr<comm::World> world) {
    for (const int kind : {0, 1, 2, 3}) {
      const auto compute = [&](NetImpl& net, const at::Tensor& x, bool recompute) {
        const auto segment = [&](const std::function<at::Tensor(const at::Tensor&)>& fn,
                                 const at::Tensor& y) {
          return recompute ? nn::recompute(fn, y) : fn(y);
        };
        auto* block = net.blocks[0]->as<BlockImpl>();
        const auto one = [block](const at::Tensor& y) { return block->forward(y); };
        switch (kind) {
          case 0:
            return segment([&net](const at::Tensor& y) { return net.forward(y); }, x);
          case 1: {  // one unit in two segments
            const at::Tensor wide = at::cat({x, x.narrow(1, 0, 1)}, 1);
            return segment(one, segment(one, wide));
          }
          case 2: {  // once plain, once in a segment
            const at::Tensor wide = at::cat({x, x.narrow(1, 0, 1)}, 1);
            return one(segment(one, wide));
          }
          default: {  // twice plain
            const at::Tensor wide = at::cat({x, x.narrow(1, 0, 1)}, 1);
            return one(one(wide));
          }
        }
      };
      Net oracle;
      Net model;
      const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
      const at::Tensor batch = make_inputs(8, 5, 0);
      const auto expected =
          reference_gradients([&] { return loss_of(compute(*oracle, batch, false)); }, *oracle);
      loss_of(compute(*model, rows_of(batch, world->rank(), 2), true)).backward();
      EXPECT_LE(worst_gradient(sharded, expected), 1e-12) << "kind " << kind;
    }
  });
}

}  // namespace
}  // namespace hypershard::shard::test
