// See adamw.h. Ranges are checked at every step too, because groups' options are the user's to
// change.
#include "hypershard/optim/adamw.h"

#include <cmath>
#include <tuple>

#include <ATen/ops/_fused_adamw.h>
#include <torch/optim/adamw.h>

#include "hypershard/core/error.h"

namespace hypershard::optim {

namespace {

const torch::optim::AdamWOptions& as_adamw(const torch::optim::OptimizerOptions& options) {
  const auto* adamw = dynamic_cast<const torch::optim::AdamWOptions*>(&options);
  HS_CHECK(
      adamw != nullptr,
      "optim: a parameter group of 'adamw' has options of another optimizer, with lr ",
      options.get_lr(),
      HS_HINT("group options must be torch::optim::AdamWOptions")
  );
  return *adamw;
}

void check_range(const torch::optim::AdamWOptions& options) {
  const auto [beta1, beta2] = options.betas();
  HS_CHECK(
      std::isfinite(options.lr()) && options.lr() >= 0,
      "optim: adamw.lr is ",
      options.lr(),
      "; expected 0 or more"
  );
  HS_CHECK(beta1 >= 0 && beta1 < 1, "optim: adamw.beta1 is ", beta1, "; expected 0 <= beta1 < 1");
  HS_CHECK(beta2 >= 0 && beta2 < 1, "optim: adamw.beta2 is ", beta2, "; expected 0 <= beta2 < 1");
  HS_CHECK(
      std::isfinite(options.eps()) && options.eps() > 0,
      "optim: adamw.eps is ",
      options.eps(),
      "; expected more than 0"
  );
  HS_CHECK(
      std::isfinite(options.weight_decay()) && options.weight_decay() >= 0,
      "optim: adamw.weight_decay is ",
      options.weight_decay(),
      "; expected 0 or more"
  );
  HS_SUPPORTED(!options.amsgrad(), "optim: adamw.amsgrad is ", options.amsgrad(), ", not built in");
}

torch::optim::AdamWOptions to_torch(const AdamWOptions& options, double weight_decay) {
  torch::optim::AdamWOptions result(options.lr);
  result.betas(std::make_tuple(options.beta1, options.beta2))
      .eps(options.eps)
      .weight_decay(weight_decay);
  check_range(result);
  return result;
}

}  // namespace

AdamW::AdamW(const shard::ShardedModel& model, const AdamWOptions& options)
    : ElementwiseOptimizer(
          model,
          options.decay_families,
          to_torch(options, options.weight_decay),
          to_torch(options, 0.0)
      ) {}

void AdamW::check_options(const Options& options) const {
  check_range(as_adamw(options));
}

std::vector<std::string> AdamW::state_names_of(const Options& /*options*/) const {
  return {"exp_avg", "exp_avg_sq"};
}

void AdamW::apply(const Options& options, Batch& batch) const {
  const torch::optim::AdamWOptions& adamw = as_adamw(options);
  const auto [beta1, beta2] = adamw.betas();
  at::_fused_adamw_(
      batch.params,
      batch.grads,
      batch.state[0],
      batch.state[1],
      /*max_exp_avg_sqs=*/{},
      batch.steps,
      adamw.lr(),
      beta1,
      beta2,
      adamw.weight_decay(),
      adamw.eps(),
      /*amsgrad=*/false,
      /*maximize=*/false
  );
}

}  // namespace hypershard::optim
