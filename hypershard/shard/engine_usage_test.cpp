// The engine used in unusual or wrong ways: the right result, or an error with a name.
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "hypershard/core/error.h"
#include "hypershard/shard/engine.h"
#include "hypershard/shard/test_models.h"

namespace hypershard::shard::test {
namespace {

using layout::Strategy;
using testing::RankBackend;

class EngineUsageTest : public ::testing::TestWithParam<RankBackend> {
 protected:
  void run(int ranks, const std::function<void(std::shared_ptr<comm::World>)>& body) {
    testing::run_ranks(ranks, body, {.backend = GetParam()});
  }
};
INSTANTIATE_TEST_SUITE_P(
    Backends,
    EngineUsageTest,
    ::testing::ValuesIn(all_backends()),
    [](const auto& each) { return testing::to_text(each.param); }
);

TEST_P(EngineUsageTest, ReshardedParameterThrowsNamingItsUnit) {
  run(2, [&](std::shared_ptr<comm::World> world) {
    Net model;
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    const at::Tensor& weight = model->blocks[1]->as<BlockImpl>()->a->weight;
    EXPECT_NE(thrown_by([&] { (void)weight.sum(); }).find("unit 'blocks.1'"), std::string::npos);
    sharded.unshard("blocks.1");
    EXPECT_TRUE(at::equal(weight, sharded.full_parameter("blocks.1.a.weight")));
    sharded.reshard("blocks.1");
    EXPECT_NE(thrown_by([&] { (void)weight.sum(); }).find("unit 'blocks.1'"), std::string::npos);
    EXPECT_NE(
        thrown_by([&] { sharded.unshard("blocks.7"); }).find("did you mean"), std::string::npos
    );
  });
}

TEST_P(EngineUsageTest, SteppingAtTheWrongTimeIsAnError) {
  run(2, [&](std::shared_ptr<comm::World> world) {
    Net model;
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    sharded.begin_update();
    const at::Tensor loss =
        loss_of(model->forward(rows_of(make_inputs(8, 5, 0), world->rank(), 2)));
    EXPECT_NE(
        thrown_by([&] { sharded.begin_update(); }).find("may not be written now"), std::string::npos
    );
    loss.backward();
    sharded.begin_update();
    {
      const at::NoGradGuard no_grad;
      (void)model->forward(make_inputs(2, 5, 1));
    }
    sharded.begin_update();  // an evaluation opens the window again
  });
}

TEST_P(EngineUsageTest, EvaluationBetweenBackwardAndStepChangesNothing) {
  run(2, [&](std::shared_ptr<comm::World> world) {
    Net oracle;
    Net model;
    model->to(at::kFloat);
    oracle->to(at::kFloat);
    FullyShardOptions options = block_units();
    options.strategy = Strategy::kZero1;
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), options);
    torch::optim::SGD plain(oracle->parameters(), torch::optim::SGDOptions(0.05));
    torch::optim::SGD optimizer(sharded.update_tensors(), torch::optim::SGDOptions(0.05));
    for (int step = 0; step < 3; ++step) {
      const at::Tensor batch = make_inputs(8, 5, step, at::kFloat);
      plain.zero_grad();
      optimizer.zero_grad();
      loss_of(oracle->forward(batch)).backward();
      const at::Tensor loss = loss_of(model->forward(rows_of(batch, world->rank(), 2)));
      const auto evaluate = [&] {
        const at::NoGradGuard no_grad;
        EXPECT_LE(
            (model->forward(batch) - oracle->forward(batch)).abs().max().item<float>(), 1e-5F
        );
      };
      evaluate();  // between forward and backward
      loss.backward();
      evaluate();  // between backward and step
      plain.step();
      optimizer.step();
      evaluate();  // after the step
    }
  });
}

TEST_P(EngineUsageTest, FailedForwardLeavesAWorkingModel) {
  run(2, [&](std::shared_ptr<comm::World> world) {
    Net oracle;
    Net model;
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    EXPECT_NE(thrown_by([&] { (void)model->forward(at::ones({2, 9}, at::kDouble)); }), "");
    const at::Tensor batch = make_inputs(8, 5, 0);
    const auto expected =
        reference_gradients([&] { return loss_of(oracle->forward(batch)); }, *oracle);
    loss_of(model->forward(rows_of(batch, world->rank(), 2))).backward();
    EXPECT_LE(worst_gradient(sharded, expected), 1e-12);
  });
}

// The hook of a block throws in backward, after later blocks have posted their gradients.
TEST_P(EngineUsageTest, FailedBackwardLeavesAWorkingModel) {
  for (const int replicate : {1, 2}) {
    run(2 * replicate, [&](const std::shared_ptr<comm::World>& world) {
      Net oracle;
      Net model;
      FullyShardOptions options = block_units();
      options.strategy = replicate == 1 ? Strategy::kZero3 : Strategy::kHsdp;
      const ShardedModel sharded = fully_shard(*model, make_mesh(world, replicate), options);
      const int ranks = world->size();
      const at::Tensor batch = make_inputs(8, 5, 0);
      at::Tensor input = rows_of(batch, world->rank(), ranks).clone().requires_grad_(true);
      for (int attempt = 0; attempt < 2; ++attempt) {
        at::Tensor loss = loss_of(model->forward(input));
        input.register_hook([](const at::Tensor&) -> void { HS_CHECK(false, "a test's hook"); });
        EXPECT_NE(thrown_by([&] { loss.backward(); }).find("a test's hook"), std::string::npos);
        input = input.detach().clone().requires_grad_(true);
      }
      sharded.begin_update();  // between steps again
      const auto expected =
          reference_gradients([&] { return loss_of(oracle->forward(batch)); }, *oracle);
      loss_of(model->forward(rows_of(batch, world->rank(), ranks))).backward();
      EXPECT_LE(worst_gradient(sharded, expected), 1e-12);
    });
  }
}

TEST_P(EngineUsageTest, TheModulesOwnZeroGradZeroes) {
  run(2, [&](const std::shared_ptr<comm::World>& world) {
    Net oracle;
    Net model;
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    for (int step = 0; step < 3; ++step) {
      const at::Tensor batch = make_inputs(8, 5, step);
      const auto expected =
          reference_gradients([&] { return loss_of(oracle->forward(batch)); }, *oracle);
      model->zero_grad();
      loss_of(model->forward(rows_of(batch, world->rank(), 2))).backward();
      EXPECT_LE(worst_gradient(sharded, expected), 1e-12) << step;
    }
  });
}

TEST_P(EngineUsageTest, ZeroGradDropsWhatWasNotReduced) {
  run(4, [&](const std::shared_ptr<comm::World>& world) {
    Net oracle;
    Net model;
    FullyShardOptions options = block_units();
    options.strategy = Strategy::kHsdp;
    const ShardedModel sharded = fully_shard(*model, make_mesh(world, 2), options);
    const auto backward = [&](int step) {
      loss_of(model->forward(rows_of(make_inputs(8, 5, step), world->rank(), 4))).backward();
    };
    sharded.set_requires_gradient_sync(false);
    backward(5);
    sharded.zero_grad();
    sharded.set_requires_gradient_sync(true);
    sharded.set_requires_all_reduce(false);
    backward(6);
    EXPECT_NE(thrown_by([&] { sharded.begin_update(); }).find("over all axes"), std::string::npos)
        << "a sum over one axis of two is no gradient to step with";
    sharded.zero_grad();
    sharded.set_requires_all_reduce(true);
    const auto expected = reference_gradients(
        [&] { return loss_of(oracle->forward(make_inputs(8, 5, 0))); }, *oracle
    );
    backward(0);
    EXPECT_LE(worst_gradient(sharded, expected), 1e-12);
    sharded.begin_update();
  });
}

TEST_P(EngineUsageTest, EvaluationBetweenForwardAndBackwardAllowsNoStep) {
  run(2, [&](const std::shared_ptr<comm::World>& world) {
    Net model;
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    const at::Tensor loss =
        loss_of(model->forward(rows_of(make_inputs(8, 5, 0), world->rank(), 2)));
    {
      const at::NoGradGuard no_grad;
      (void)model->forward(make_inputs(2, 5, 1));
    }
    EXPECT_NE(
        thrown_by([&] { sharded.begin_update(); }).find("may not be written now"), std::string::npos
    );
    loss.backward();
    sharded.begin_update();
  });
}

TEST_P(EngineUsageTest, OtherOptionsOnOneRankAreFoundOut) {
  run(2, [&](const std::shared_ptr<comm::World>& world) {
    const auto refused = [&](const FullyShardOptions& options, const std::string& part) {
      Net model;
      const std::string text =
          thrown_by([&] { (void)fully_shard(*model, make_mesh(world), options); });
      EXPECT_NE(text.find(part), std::string::npos) << text;
    };
    FullyShardOptions options = block_units();
    options.forward_prefetch = world->rank();
    refused(options, "rank 1 was given other options");
    options = block_units();
    if (world->rank() == 1) {
      options.units = {"blocks.0"};
    }
    options.initial_values = InitialValues::kTrust;
    refused(options, "differs in name, shape, dtype, unit");
  });
}

TEST_P(EngineUsageTest, ForwardThatBypassesTheHooksIsAnError) {
  run(2, [&](std::shared_ptr<comm::World> world) {
    torch::nn::ModuleHolder<nn::Hooked<torch::nn::LinearImpl>> model(4, 4);
    fill_by_formula(*model);
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), {});
    const std::string text = thrown_by([&] {
      static_cast<torch::nn::LinearImpl&>(*model).forward(at::ones({2, 4})).sum().backward();
    });
    EXPECT_NE(text.find("root"), std::string::npos) << text;
  });
}

TEST_P(EngineUsageTest, SeveralForwardsBeforeOneBackwardAddUp) {
  run(2, [&](std::shared_ptr<comm::World> world) {
    Net oracle;
    Net model;
    const ShardedModel sharded = fully_shard(*model, make_mesh(world), block_units());
    const at::Tensor a = make_inputs(8, 5, 0);
    const at::Tensor b = make_inputs(8, 5, 1);
    const auto expected = reference_gradients(
        [&] { return loss_of(oracle->forward(a)) + loss_of(oracle->forward(b)); }, *oracle
    );
    (loss_of(model->forward(rows_of(a, world->rank(), 2))) +
     loss_of(model->forward(rows_of(b, world->rank(), 2))))
        .backward();
    EXPECT_LE(worst_gradient(sharded, expected), 1e-12);
  });
}

TEST_P(EngineUsageTest, ReducedBackwardsWithoutZeroGradAddUp) {
  run(2, [&](std::shared_ptr<comm::World> world) {
    for (const Strategy strategy : {Strategy::kDdp, Strategy::kZero1, Strategy::kZero3}) {
      Net oracle;
      Net model;
      FullyShardOptions options = block_units();
      options.strategy = strategy;
      const ShardedModel sharded = fully_shard(*model, make_mesh(world), options);
      const at::Tensor a = make_inputs(8, 5, 0);
      const at::Tensor b = make_inputs(8, 5, 1);
      const auto expected = reference_gradients(
          [&] { return loss_of(oracle->forward(a)) + loss_of(oracle->forward(b)); }, *oracle
      );
      loss_of(model->forward(rows_of(a, world->rank(), 2))).backward();
      loss_of(model->forward(rows_of(b, world->rank(), 2))).backward();
      EXPECT_LE(worst_gradient(sharded, expected), 1e-12) << to_text(strategy);
    }
  });
}

TEST_P(EngineUsageTest, PrefetchBoundsTheUnshardedBytes) {
  run(2, [&](std::shared_ptr<comm::World> world) {
    FullyShardOptions options = block_units();
    options.share = Share::kOff;
    const auto peak_with = [&](int prefetch, int blocks) {
      Net model(NetOptions{.num_blocks = blocks});
      options.forward_prefetch = prefetch;
      options.backward_prefetch = prefetch;
      const ShardedModel sharded = fully_shard(*model, make_mesh(world), options);
      for (int step = 0; step < 2; ++step) {
        loss_of(model->forward(rows_of(make_inputs(8, 5, step), world->rank(), 2))).backward();
        sharded.zero_grad();
      }
      EXPECT_EQ(sharded.counters().live_unsharded_bytes, 0);
      return sharded.counters().peak_unsharded_bytes;
    };
    const auto narrow = peak_with(0, 4);
    EXPECT_EQ(narrow, peak_with(0, 12)) << "peak must not depend on depth";
    EXPECT_EQ(peak_with(1, 4), peak_with(1, 12)) << "peak must not depend on depth";
    EXPECT_GT(peak_with(2, 12), narrow);
  });
}

TEST(EngineOptionsTest, BadOptionsNameWhatIsValid) {
  testing::run_ranks(1, [](std::shared_ptr<comm::World> world) {
    const auto refused = [&](FullyShardOptions options, const std::string& text) {
      Net model;
      const std::string found =
          thrown_by([&] { (void)fully_shard(*model, make_mesh(world), options); });
      EXPECT_NE(found.find(text), std::string::npos) << found;
    };
    FullyShardOptions options;
    options.units = {"block.*"};
    refused(options, "units pattern 'block.*' matches no module");
    options = {};
    options.units = {"in"};
    refused(options, "module 'in' of type");
    options = {};
    options.ignored = {"**.wieght"};
    refused(options, "ignored pattern '**.wieght' matches no parameter");
    options = {};
    options.gradient_buffers = 0;
    refused(options, "gradient_buffers");
    options = {};
    options.forward_prefetch = -1;
    refused(options, "forward_prefetch");
    options = {};
    options.strategy = Strategy::kHsdp;
    refused(options, "replicate");
    options = {};
    options.share = Share::kOn;
    refused(options, "share = on");
    Net model;
    const ShardedModel once = fully_shard(*model, make_mesh(world), {});
    EXPECT_NE(
        thrown_by([&] { (void)fully_shard(*model, make_mesh(world), {}); }
        ).find("belongs to a sharded model already"),
        std::string::npos
    );
    EXPECT_NE(
        thrown_by([&] { (void)once.update_tensors("decoy"); }).find("did you mean 'decay'"),
        std::string::npos
    );
    EXPECT_NE(
        thrown_by([&] { (void)once.clip_grad_norm_(-1); }).find("max_norm"), std::string::npos
    );
    EXPECT_NE(
        thrown_by([&] { (void)once.clip_grad_norm_(1, 0); }).find("norm_type"), std::string::npos
    );
  });
}

}  // namespace
}  // namespace hypershard::shard::test
