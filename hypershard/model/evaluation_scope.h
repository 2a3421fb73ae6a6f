// Evaluation mode for a while: what sampling and held-out losses run under.
#pragma once

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

namespace hypershard::model {

/// Switches a module to evaluation and autograd off while alive; then both are as they were.
class EvaluationScope {
 public:
  explicit EvaluationScope(torch::nn::Module& module)
      : module_(module), was_training_(module.is_training()) {
    module_.eval();
  }
  ~EvaluationScope() { module_.train(was_training_); }
  EvaluationScope(const EvaluationScope&) = delete;
  EvaluationScope& operator=(const EvaluationScope&) = delete;

 private:
  torch::nn::Module& module_;
  bool was_training_;
  at::NoGradGuard no_grad_;
};

}  // namespace hypershard::model
