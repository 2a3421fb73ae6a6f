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

// What these tests measure by: a NaN is near nothing.
TEST(WorstGradientTest, IsInfiniteIfOneElementIsNotFinite) {
  testing::run_ranks(1, [](const std::shared_ptr<comm::World>& world) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    Net model;
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    loss_of(model->forward(make_inputs(8, 5, 0))).backward();
    std::map<std::string, at::Tensor> expected;
    for (const std::string& name : sharded.parameter_names()) {
      expected[name] = sharded.full_gradient(name);
    }
    const at::Tensor element = sharded.update_tensors().front().grad().narrow(0, 0, 1);
    const at::Tensor kept = element.clone();
    for (const Deviation deviation : {Deviation::kAbsolute, Deviation::kRelative}) {
      EXPECT_EQ(worst_gradient(sharded, expected, deviation), 0);
      for (const double bad : {std::nan(""), kInfinity}) {
        element.fill_(bad);
        EXPECT_EQ(worst_gradient(sharded, expected, deviation), kInfinity) << bad;
        element.copy_(kept);
      }
    }
    EXPECT_GT(least_difference(expected, 3), 0);
    expected["blocks.1.a.bias"].fill_(std::nan(""));
    EXPECT_EQ(worst_gradient(sharded, expected), kInfinity);
    EXPECT_EQ(least_difference(expected, 3), 0);
  });
}

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
  explicit ScaleImpl(std::int64_t numel = 5) {
    w = register_parameter("w", at::zeros({numel}, at::kDouble));
  }
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

// bf16 keeps 8 bits: of 1 and three times 2^-9 it knows what they are, not their sum, on whichever
// rank the 1 is. fp32 knows the sum and a quarter of it exactly; gradients may lie in bf16 until
// they are summed.
TEST_P(EngineTest, Bf16GradientsAreSummedInFp32) {
  constexpr int kRanks = 4;
  constexpr float kMean = (1 + 3 * 0x1p-9F) / kRanks;
  const at::Tensor expected = at::full({64}, kMean, at::kFloat);
  ASSERT_GT(largest_difference(expected.to(at::kBFloat16), expected), 0);
  run(kRanks, [&](const std::shared_ptr<comm::World>& world) {
    for (const Strategy strategy : {Strategy::kZero2, Strategy::kZero3}) {
      for (const at::ScalarType buffers : {at::kFloat, at::kBFloat16}) {
        Scale model(64);
        model->to(at::kFloat);
        FullyShardOptions options;
        options.strategy = strategy;
        options.precision.compute = at::kBFloat16;
        options.precision.reduce = buffers;
        const ShardedModel sharded = fully_shard(*model, make_mesh(world), options);
        const at::Tensor x = at::full({64}, 0x1p-9, at::kBFloat16);
        x.slice(0, world->rank(), 64, kRanks).fill_(1);
        model->forward(x).backward();
        EXPECT_TRUE(at::equal(sharded.full_gradient("w"), expected))
            << to_text(strategy) << ", buffers in " << buffers << ": "
            << sharded.full_gradient("w");
      }
    }
  });
}

TEST_P(EngineTest, OptimizerBuiltBeforeShardingThrowsNamingTheParameter) {
  run(2, [&](std::shared_ptr<comm::World> world) {
    Net model;
    torch::optim::SGD early(model->parameters(), torch::optim::SGDOptions(0.1));
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    loss_of(model->forward(rows_of(make_inputs(8, 5, 0), world->rank(), 2))).backward();
    for (int step = 0; step < 2; ++step) {
      const std::string text = thrown_by([&] { early.step(); });
      EXPECT_NE(text.find("in.weight"), std::string::npos) << text;
      EXPECT_NE(text.find("update_parameters()"), std::string::npos) << text;
      early.zero_grad();  // forgets the gradients that say so
      loss_of(model->forward(rows_of(make_inputs(8, 5, 0), world->rank(), 2))).backward();
    }
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

// No rank runs a unit while the order is recorded; later one does.
TEST_P(EngineTest, UnitThatComesLaterContributes) {
  run(2, [&](const std::shared_ptr<comm::World>& world) {
    const int rank = world->rank();
    Net oracle;
    Net model;
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    for (int step = 0; step < 4; ++step) {
      const auto skipped = [&](int who) { return step == 0 || (step != 3 && who == 1) ? 1 : -1; };
      const at::Tensor batch = make_inputs(8, 5, step);
      oracle->zero_grad();
      for (int r = 0; r < 2; ++r) {
        oracle->skip_block = skipped(r);
        (loss_of(oracle->forward(rows_of(batch, r, 2))) / 2).backward();
      }
      std::map<std::string, at::Tensor> expected;
      for (const auto& item : oracle->named_parameters()) {
        const at::Tensor& grad = item.value().grad();
        expected[item.key()] = grad.defined() ? grad.clone() : at::zeros_like(item.value());
      }
      sharded.zero_grad();
      model->skip_block = skipped(rank);
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
        EXPECT_GT(least_difference(expected, shape.num_blocks), 1e-3);
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

TEST_P(EngineTest, CollectivesComeInTheSameOrderOnAllRanks) {
  run(3, [&](std::shared_ptr<comm::World> world) {
    Net model(NetOptions{.memory_shift = world->rank()});
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
