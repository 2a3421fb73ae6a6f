// Stochastic gradient descent over a sharded model, by ATen's fused kernel.
// The same numbers as torch::optim::SGD on the whole parameters.
#pragma once

#include <string>
#include <vector>

#include "hypershard/optim/elementwise_optimizer.h"

namespace hypershard::optim {

/// Options of Sgd.
struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0;
  bool nesterov = false;    ///< look ahead along the momentum; needs momentum > 0
  double weight_decay = 0;  ///< added to the gradient, before momentum
  /// Update families that decay; see shard::FullyShardOptions::update_family.
  std::vector<std::string> decay_families = {"decay"};
};

/// Steps g <- g + wd p, b <- momentum b + g, then p <- p - lr b (nesterov: p - lr (g + momentum
/// b)).
///
/// State `momentum_buffer` (b) exists only where momentum is not 0. There is no dampening. Group
/// options are torch::optim::SGDOptions.
/// Source: Sutskever et al. (2013) in PyTorch's form, where lr scales the buffer and not the
/// gradient.
class Sgd final : public ElementwiseOptimizer {
 public:
  /// Errors: InvalidArgument for options out of range or an unknown family.
  explicit Sgd(const shard::ShardedModel& model, const SgdOptions& options = {});

  std::string kind() const override { return "sgd"; }

 private:
  void check_options(const Options& options) const override;
  std::vector<std::string> state_names_of(const Options& options) const override;
  void apply(const Options& options, Batch& batch) const override;
};

}  // namespace hypershard::optim
