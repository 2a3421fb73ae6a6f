// The rules under test beside torch's own, and gradients that both sides get alike.
#pragma once

#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/output-archive.h>

#include "hypershard/core/error.h"
#include "hypershard/optim/adamw.h"
#include "hypershard/optim/sgd.h"
#include "hypershard/shard/engine.h"
#include "hypershard/shard/test_models.h"
#include "hypershard/testing/tensor_matchers.h"

namespace hypershard::optim::test {

using layout::Strategy;
using shard::fully_shard;
using shard::FullyShardOptions;
using shard::ShardedModel;
using shard::UpdatePiece;
using shard::UpdateTensor;
using shard::test::make_inputs;
using shard::test::make_mesh;
using shard::test::Net;
using shard::test::rows_of;

using WorldPtr = std::shared_ptr<comm::World>;
using OptimizerPtr = std::unique_ptr<torch::optim::Optimizer>;
using TorchGroups = std::vector<torch::optim::OptimizerParamGroup>;

inline FullyShardOptions block_units(Strategy strategy = Strategy::kZero3) {
  FullyShardOptions options;
  options.strategy = strategy;
  options.units = {"blocks.*"};
  return options;
}

inline std::string thrown_by(const std::function<void()>& body) {
  try {
    body();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "nothing was thrown";
}

inline void expect_part(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

// A gradient that depends on the step, the element and the value itself, so that a wrong update
// shows again in the next step.
inline at::Tensor gradient_of(const at::Tensor& value, int step) {
  const at::Tensor wave =
      at::arange(value.numel(), at::kDouble).mul(0.31).add(0.7 * step).sin().view(value.sizes());
  return (wave + value.to(at::kDouble) * 0.5).to(value.scalar_type());
}

inline void set_plain_gradients(torch::nn::Module& module, int step) {
  for (auto& item : module.named_parameters()) {
    item.value().mutable_grad() = gradient_of(item.value().detach(), step);
  }
}

// The same gradients, each rank its pieces. `full` are the values before the step.
inline void set_sharded_gradients(const ShardedModel& sharded, int step) {
  std::map<std::string, at::Tensor> full;
  for (const std::string& name : sharded.parameter_names()) {
    full[name] = gradient_of(sharded.full_parameter(name), step).reshape({-1});
  }
  for (UpdateTensor& update : sharded.update_parameters()) {
    at::Tensor grad = at::zeros_like(update.tensor);
    for (const UpdatePiece& piece : update.pieces) {
      grad.narrow(0, piece.offset, piece.range.numel())
          .copy_(full[piece.name].narrow(0, piece.range.begin, piece.range.numel()));
    }
    update.tensor.mutable_grad() = grad;
  }
}

struct Rule {
  std::string name;
  std::function<OptimizerPtr(TorchGroups)> make_plain;
  std::function<std::unique_ptr<ShardedOptimizer>(const ShardedModel&)> make_sharded;
};

inline Rule adamw_rule() {
  return {
      "adamw",
      [](const TorchGroups& groups) -> OptimizerPtr {
        const torch::optim::AdamWOptions options(0.02);  // the defaults are to be the same, too
        auto optimizer = std::make_unique<torch::optim::AdamW>(groups, options);
        auto& undecayed = optimizer->param_groups()[1].options();
        static_cast<torch::optim::AdamWOptions&>(undecayed).weight_decay(0);
        return optimizer;
      },
      [](const ShardedModel& model) -> std::unique_ptr<ShardedOptimizer> {
        return std::make_unique<AdamW>(model, AdamWOptions{.lr = 0.02});
      }
  };
}

inline Rule sgd_rule(double momentum, bool nesterov) {
  return {
      "sgd",
      [=](const TorchGroups& groups) -> OptimizerPtr {
        const auto options =
            torch::optim::SGDOptions(0.05).momentum(momentum).nesterov(nesterov).weight_decay(0.2);
        auto optimizer = std::make_unique<torch::optim::SGD>(groups, options);
        auto& undecayed = optimizer->param_groups()[1].options();
        static_cast<torch::optim::SGDOptions&>(undecayed).weight_decay(0);
        return optimizer;
      },
      [=](const ShardedModel& model) -> std::unique_ptr<ShardedOptimizer> {
        return std::make_unique<Sgd>(
            model,
            SgdOptions{.lr = 0.05, .momentum = momentum, .nesterov = nesterov, .weight_decay = 0.2}
        );
      }
  };
}

inline std::vector<Rule> all_rules() {
  return {adamw_rule(), sgd_rule(0, false), sgd_rule(0.9, false), sgd_rule(0.9, true)};
}

inline TorchGroups plain_groups(torch::nn::Module& module) {
  std::vector<at::Tensor> matrices;
  std::vector<at::Tensor> vectors;
  for (const auto& item : module.named_parameters()) {
    (item.value().dim() >= 2 ? matrices : vectors).push_back(item.value());
  }
  TorchGroups groups;
  groups.emplace_back(matrices);
  groups.emplace_back(vectors);
  return groups;
}

}  // namespace hypershard::optim::test
