// AdamW over a sharded model: Adam with decoupled weight decay, by ATen's fused kernel.
// The same numbers as torch::optim::AdamW on the whole parameters.
#pragma once

#include <string>
#include <vector>

#include "hypershard/optim/elementwise_optimizer.h"

namespace hypershard::optim {

/// Options of AdamW, with torch's defaults. Unlike there, only the families in `decay_families`
/// decay: by default `decay`, which parameters of two dimensions and more are in.
struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;  ///< positive: padding has no gradient, and 0/0 would fill it
  double weight_decay = 0.01;
  /// Update families that decay; see shard::FullyShardOptions::update_family.
  std::vector<std::string> decay_families = {"decay"};
};

/// Steps m <- b1 m + (1-b1) g, v <- b2 v + (1-b2) g^2, then
/// p <- p (1 - lr wd) - lr (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps), t counted per update
/// tensor.
///
/// State `exp_avg` (m) and `exp_avg_sq` (v) has the update dtype. Group options are
/// torch::optim::AdamWOptions.
/// Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019), algorithm 2, with
/// the decay scaled by lr, as PyTorch does.
class AdamW final : public ElementwiseOptimizer {
 public:
  /// Errors: InvalidArgument for options out of range or an unknown family.
  explicit AdamW(const shard::ShardedModel& model, const AdamWOptions& options = {});

  std::string kind() const override { return "adamw"; }

 private:
  void check_options(const Options& options) const override;
  std::vector<std::string> state_names_of(const Options& options) const override;
  void apply(const Options& options, Batch& batch) const override;
};

}  // namespace hypershard::optim
