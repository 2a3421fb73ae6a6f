// See sgd.h. A buffer of zeros and no dampening give torch's first step, so that the kernel needs
// no case for it.
#include "hypershard/optim/sgd.h"

#include <cmath>
#include <utility>

#include <ATen/ops/_fused_sgd.h>
#include <torch/optim/sgd.h>

#include "hypershard/core/error.h"

namespace hypershard::optim {

namespace {

const torch::optim::SGDOptions& as_sgd(const torch::optim::OptimizerOptions& options) {
  const auto* sgd = dynamic_cast<const torch::optim::SGDOptions*>(&options);
  HS_CHECK(
      sgd != nullptr,
      "optim: a parameter group of 'sgd' has options of another optimizer, with lr ",
      options.get_lr(),
      HS_HINT("group options must be torch::optim::SGDOptions")
  );
  return *sgd;
}

void check_range(const torch::optim::SGDOptions& options) {
  HS_CHECK(
      std::isfinite(options.lr()) && options.lr() >= 0,
      "optim: sgd.lr is ",
      options.lr(),
      "; expected 0 or more"
  );
  HS_CHECK(
      options.momentum() >= 0 && options.momentum() < 1,
      "optim: sgd.momentum is ",
      options.momentum(),
      "; expected 0 <= momentum < 1"
  );
  HS_CHECK(
      std::isfinite(options.weight_decay()) && options.weight_decay() >= 0,
      "optim: sgd.weight_decay is ",
      options.weight_decay(),
      "; expected 0 or more"
  );
  HS_CHECK(
      !options.nesterov() || options.momentum() > 0,
      "optim: sgd.nesterov needs momentum, which is ",
      options.momentum()
  );
  HS_SUPPORTED(
      options.dampening() == 0,
      "optim: sgd.dampening is ",
      options.dampening(),
      "; only 0 is built in"
  );
}

torch::optim::SGDOptions to_torch(const SgdOptions& options, double weight_decay) {
  torch::optim::SGDOptions result(options.lr);
  result.momentum(options.momentum).nesterov(options.nesterov).weight_decay(weight_decay);
  check_range(result);
  return result;
}

}  // namespace

Sgd::Sgd(const shard::ShardedModel& model, const SgdOptions& options)
    : ElementwiseOptimizer(
          model,
          options.decay_families,
          to_torch(options, options.weight_decay),
          to_torch(options, 0.0)
      ) {}

void Sgd::check_options(const Options& options) const {
  check_range(as_sgd(options));
}

std::vector<std::string> Sgd::state_names_of(const Options& options) const {
  return as_sgd(options).momentum() == 0 ? std::vector<std::string>()
                                         : std::vector<std::string>{"momentum_buffer"};
}

void Sgd::apply(const Options& options, Batch& batch) const {
  const torch::optim::SGDOptions& sgd = as_sgd(options);
  const bool has_buffers = sgd.momentum() != 0;
  at::_fused_sgd_(
      batch.params,
      batch.grads,
      has_buffers ? at::TensorList(batch.state[0]) : at::TensorList(),
      sgd.weight_decay(),
      sgd.momentum(),
      sgd.lr(),
      /*dampening=*/0.0,
      sgd.nesterov(),
      /*maximize=*/false,
      /*is_first_step=*/false
  );
}

}  // namespace hypershard::optim
