// Tensor, sequence and vocabulary parallelism under every strategy: losses, every gradient, norms
// and parameters are those of the unsharded run.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include "hypershard/shard/engine.h"
#include "hypershard/shard/test_tensor_parallel.h"

namespace hypershard::shard::test {
namespace {

using layout::Strategy;
using testing::RankBackend;

struct Case {
  Strategy strategy;
  TpMesh mesh;
  bool sequence = true;
  RankBackend backend = RankBackend::kLocal;
};

std::string name_of(const ::testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  return to_text(c.strategy) + "_" + c.mesh.text() + (c.sequence ? "_sp_" : "_tp_") +
         testing::to_text(c.backend);
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const RankBackend backend : all_backends()) {
    for (const bool sequence : {true, false}) {
      for (const Strategy strategy :
           {Strategy::kDdp, Strategy::kZero1, Strategy::kZero2, Strategy::kZero3}) {
        cases.push_back({strategy, {.tp = 2}, sequence, backend});
        cases.push_back({strategy, {.shard = 1, .tp = 2}, sequence, backend});
        cases.push_back({strategy, {.shard = 2, .tp = 2}, sequence, backend});
        cases.push_back({strategy, {.replicate = 2, .tp = 2}, sequence, backend});
      }
      for (const Strategy strategy : {Strategy::kHsdp, Strategy::kHierarchical}) {
        cases.push_back({strategy, {.replicate = 1, .shard = 2, .tp = 2}, sequence, backend});
        cases.push_back({strategy, {.replicate = 2, .shard = 1, .tp = 2}, sequence, backend});
      }
    }
    cases.push_back({Strategy::kZero3, {.tp = 4}, true, backend});
  }
  for (const Strategy strategy : {Strategy::kHsdp, Strategy::kHierarchical}) {
    cases.push_back({strategy, {.replicate = 2, .shard = 2, .tp = 2}});
  }
  return cases;
}

constexpr std::int64_t kRows = 8;
constexpr int kSteps = 5;

FullyShardOptions options_of(Strategy strategy, const TpNetImpl& model) {
  FullyShardOptions options;
  options.strategy = strategy;
  options.units = {"blocks.*"};
  options.parameters = model.specs();
  return options;
}

torch::optim::AdamWOptions adamw() {
  return torch::optim::AdamWOptions(0.01).weight_decay(0.1);
}

double mean_over(const at::Tensor& loss, const comm::ProcessMesh& mesh) {
  const at::Tensor sum = loss.detach().to(at::kDouble).view({1}).clone();
  mesh.world().world_communicator()->all_reduce(sum)->wait_released();
  return sum.item<double>() / mesh.mesh().size();
}

/// Each tensor once: torch lists a tied one under both names.
std::vector<at::Tensor> parameters_of(TpNetImpl& model) {
  std::vector<at::Tensor> parameters;
  for (const auto& item : model.named_parameters()) {
    if (item.key() != "head") {
      parameters.push_back(item.value());
    }
  }
  return parameters;
}

/// The unsharded run, step by step beside the sharded one.
struct Oracle {
  explicit Oracle(const TpSizes& sizes = {})
      : model(sizes), optimizer(parameters_of(*model), adamw()) {}
  double backward(const at::Tensor& tokens) {
    const at::Tensor loss = model->forward(tokens);
    loss.backward();
    return loss.item<double>();
  }
  std::map<std::string, at::Tensor> gradients() {
    std::map<std::string, at::Tensor> result;
    for (const auto& item : model->named_parameters()) {
      result[item.key()] = item.value().grad();
    }
    return result;
  }
  TpNet model;
  torch::optim::AdamW optimizer;
};

class PlanAxesTest : public ::testing::TestWithParam<Case> {};

TEST_P(PlanAxesTest, FiveClippedStepsEqualTheUnshardedRun) {
  const Case& c = GetParam();
  testing::run_ranks(
      c.mesh.ranks(),
      [&](std::shared_ptr<comm::World> world) {
        const auto mesh = c.mesh.make(std::move(world));
        Oracle oracle;
        TpNet model(TpSizes{}, TensorParallel{mesh, c.sequence});
        const ShardedModel sharded = fully_shard(*model, *mesh, options_of(c.strategy, *model));
        torch::optim::AdamW optimizer(sharded.update_tensors(), adamw());
        for (int step = 0; step < kSteps; ++step) {
          const at::Tensor tokens = make_tokens(kRows, {}, step);
          oracle.optimizer.zero_grad();
          sharded.zero_grad();
          const double expected = oracle.backward(tokens);
          const at::Tensor loss = model->forward(own_tokens(tokens, *mesh));
          loss.backward();
          ASSERT_NEAR(mean_over(loss, *mesh), expected, 1e-10 * std::abs(expected)) << step;
          ASSERT_LE(worst_gradient(sharded, oracle.gradients()), 1e-10) << step;
          const double norm = torch::nn::utils::clip_grad_norm_(parameters_of(*oracle.model), 0.5);
          ASSERT_GT(norm, 0.5) << "clipping is not tested";
          ASSERT_NEAR(sharded.clip_grad_norm_(0.5), norm, 1e-10 * norm) << step;
          ASSERT_LE(worst_gradient(sharded, oracle.gradients()), 1e-10) << step;
          oracle.optimizer.step();
          optimizer.step();
        }
        for (const auto& item : oracle.model->named_parameters()) {
          const at::Tensor found = sharded.full_parameter(item.key());
          ASSERT_EQ(found.sizes(), item.value().sizes()) << item.key();
          EXPECT_LE((found - item.value()).abs().max().item<double>(), 1e-10) << item.key();
        }
      },
      {.backend = c.backend}
  );
}

INSTANTIATE_TEST_SUITE_P(All, PlanAxesTest, ::testing::ValuesIn(all_cases()), name_of);

}  // namespace
}  // namespace hypershard::shard::test
