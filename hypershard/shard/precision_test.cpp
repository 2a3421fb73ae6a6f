// Four dtypes of a parameter's life: mixed storage, compute, reduce and update, and what happens to
// unusual parameters.
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

using testing::RankBackend;

class PrecisionTest : public ::testing::TestWithParam<RankBackend> {};
INSTANTIATE_TEST_SUITE_P(
    Backends,
    PrecisionTest,
    ::testing::ValuesIn(all_backends()),
    [](const auto& each) { return testing::to_text(each.param); }
);

// bf16 keeps 8 bits: each product and sum is off by at most 2^-8; over a net this shallow the loss
// stays within 3 %.
TEST_P(PrecisionTest, Bf16ComputeStaysNearFp32AndUpdatesInFp32) {
  testing::run_ranks(
      2,
      [&](std::shared_ptr<comm::World> world) {
        Net oracle;
        oracle->to(at::kFloat);
        Net model;
        model->to(at::kFloat);
        const comm::ProcessMesh mesh = make_mesh(world);
        FullyShardOptions options;
        options.units = {"blocks.*"};
        options.precision.compute = at::kBFloat16;
        options.precision.output = at::kFloat;
        ShardedModel sharded = fully_shard(*model, mesh, options);
        for (const UpdateTensor& update : sharded.update_parameters()) {
          EXPECT_EQ(update.tensor.scalar_type(), at::kFloat);
        }
        EXPECT_EQ(model->in->weight.scalar_type(), at::kBFloat16);
        torch::optim::AdamW reference(oracle->parameters(), torch::optim::AdamWOptions(0.003));
        torch::optim::AdamW optimizer(sharded.update_tensors(), torch::optim::AdamWOptions(0.003));
        for (int step = 0; step < 20; ++step) {
          const at::Tensor batch = make_inputs(12, 5, step, at::kFloat);
          reference.zero_grad();
          const at::Tensor expected = loss_of(oracle->forward(batch));
          expected.backward();
          reference.step();
          optimizer.zero_grad();
          const at::Tensor output = model->forward(rows_of(batch, world->rank(), 2));
          EXPECT_EQ(output.scalar_type(), at::kFloat);
          at::Tensor loss = loss_of(output);
          loss.backward();
          optimizer.step();
          at::Tensor joint = loss.detach().clone().view({1});
          world->world_communicator()->all_reduce(joint)->wait_released();
          EXPECT_NEAR(
              joint.item<float>() / 2,
              expected.item<float>(),
              0.03 * std::abs(expected.item<float>())
          ) << step;
        }
      },
      {.backend = GetParam()}
  );
}

// Row 28 in spirit: after every step the runtime parameters are the cast of the update parameters.
TEST_P(PrecisionTest, RuntimeIsTheCastOfTheUpdate) {
  testing::run_ranks(
      3,
      [&](std::shared_ptr<comm::World> world) {
        Net model;
        model->to(at::kFloat);
        const comm::ProcessMesh mesh = make_mesh(world);
        FullyShardOptions options;
        options.units = {"blocks.*"};
        options.precision.compute = at::kBFloat16;
        ShardedModel sharded = fully_shard(*model, mesh, options);
        torch::optim::SGD optimizer(sharded.update_tensors(), torch::optim::SGDOptions(0.1));
        for (int step = 0; step < 3; ++step) {
          optimizer.zero_grad();
          loss_of(model->forward(rows_of(make_inputs(12, 5, step, at::kFloat), world->rank(), 3))
                      .to(at::kFloat))
              .backward();
          optimizer.step();
          sharded.unshard("blocks.1");
          const at::Tensor runtime = model->blocks[1]->as<BlockImpl>()->a->weight.detach().clone();
          sharded.reshard("blocks.1");
          EXPECT_TRUE(
              at::equal(runtime, sharded.full_parameter("blocks.1.a.weight").to(at::kBFloat16))
          );
        }
      },
      {.backend = GetParam()}
  );
}

TEST_P(PrecisionTest, StorageApartFromComputeIsCastAfterTheGather) {
  testing::run_ranks(
      2,
      [&](std::shared_ptr<comm::World> world) {
        Net model;
        model->to(at::kFloat);
        const comm::ProcessMesh mesh = make_mesh(world);
        FullyShardOptions options;
        options.units = {"blocks.*"};
        options.precision.storage = at::kFloat;
        options.precision.compute = at::kBFloat16;
        const ShardedModel sharded = fully_shard(*model, mesh, options);
        sharded.unshard("blocks.0");
        const at::Tensor runtime = model->blocks[0]->as<BlockImpl>()->a->weight.detach();
        EXPECT_EQ(runtime.scalar_type(), at::kBFloat16);
        EXPECT_TRUE(
            at::equal(runtime, sharded.full_parameter("blocks.0.a.weight").to(at::kBFloat16))
        );
        sharded.reshard("blocks.0");
      },
      {.backend = GetParam()}
  );
}

// Row 15: float, bf16 and double weights in one unit, gathered bit for bit, and trained.
struct MixedImpl : nn::Hookable<MixedImpl, at::Tensor(at::Tensor), torch::nn::Module> {
  MixedImpl() {
    f = register_parameter("f", at::arange(7, at::kFloat).sin());
    h = register_parameter("h", at::arange(7, at::kFloat).cos().to(at::kBFloat16));
    d = register_parameter("d", at::arange(7, at::kDouble).mul(0.3).sin());
    scalar = register_parameter("scalar", at::tensor(1.5, at::kDouble));
    empty = register_parameter("empty", at::empty({0, 3}));
    transposed =
        register_parameter("transposed", at::arange(14, at::kDouble).view({2, 7}).t().mul(0.01));
  }
  at::Tensor forward_impl(const at::Tensor& x) {
    return ((f.to(at::kDouble) + h.to(at::kDouble) * d) * x).sum(1, true) * scalar + empty.sum() +
           x.matmul(transposed).sum(1, true);
  }
  at::Tensor f, h, d, scalar, empty, transposed;
};
TORCH_MODULE(Mixed);

TEST_P(PrecisionTest, UnusualParametersLiveInOneUnit) {
  for (const int ranks : {1, 2, 4}) {
    testing::run_ranks(
        ranks,
        [&](std::shared_ptr<comm::World> world) {
          Mixed oracle;
          Mixed model;
          const comm::ProcessMesh mesh = make_mesh(world);
          const ShardedModel sharded = fully_shard(*model, mesh, {});
          const at::Tensor batch = make_inputs(8, 7, 0);
          for (const auto& item : oracle->named_parameters()) {
            const at::Tensor found = sharded.full_parameter(item.key());
            EXPECT_TRUE(at::equal(found, item.value().to(found.scalar_type()))) << item.key();
            EXPECT_EQ(found.sizes(), item.value().sizes()) << item.key();
          }
          const auto expected =
              reference_gradients([&] { return oracle->forward(batch).pow(2).mean(); }, *oracle);
          model->forward(rows_of(batch, world->rank(), ranks)).pow(2).mean().backward();
          for (const auto& [name, gradient] : expected) {
            const at::Tensor found = sharded.full_gradient(name);
            const double scale = gradient.numel() > 0 ? gradient.abs().max().item<double>() : 1.0;
            const double bound = gradient.scalar_type() == at::kDouble  ? 1e-12
                                 : gradient.scalar_type() == at::kFloat ? 1e-6
                                                                        : 1e-2;
            if (gradient.numel() > 0) {
              EXPECT_LE(
                  (found - gradient.to(found.scalar_type())).abs().max().item<double>(),
                  bound * scale
              ) << name;
            }
            EXPECT_EQ(
                found.scalar_type(),
                gradient.scalar_type() == at::kDouble ? at::kDouble : at::kFloat
            ) << name;
          }
          torch::optim::SGD optimizer(sharded.update_tensors(), torch::optim::SGDOptions(0.1));
          optimizer.step();
          EXPECT_FALSE(at::equal(sharded.full_parameter("scalar"), oracle->scalar));
        },
        {.backend = GetParam()}
    );
  }
}

TEST(PrecisionOptionsTest, IntegerDtypeIsRefusedWithTheFieldsName) {
  testing::run_ranks(1, [](std::shared_ptr<comm::World> world) {
    Net model;
    FullyShardOptions options;
    options.precision.reduce = at::kInt;
    try {
      (void)fully_shard(*model, make_mesh(world), options);
      FAIL() << "accepted";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("precision.reduce is Int"), std::string::npos)
          << error.what();
    }
  });
}

}  // namespace
}  // namespace hypershard::shard::test
