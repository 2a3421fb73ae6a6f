// Optimizers over the update parameters of a sharded model.
// They are torch::optim::Optimizers, so that libtorch's learning-rate schedulers drive them; the arithmetic is ATen's fused kernels on flat slices.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "hypershard/shard/fully_shard.h"

namespace hypershard::optim {

/// One tensor of optimizer state, lying like the update tensor it belongs to.
struct StateTensor {
  std::string name;    ///< `exp_avg`, `exp_avg_sq`, `momentum_buffer`
  std::size_t update;  ///< index into update_parameters()
  at::Tensor tensor;   ///< 1-D, as long as the update tensor
};

/// Base of our optimizers: what checkpoints and reports need beside step().
///
/// step() calls ShardedModel::begin_update() first, so that a step at a wrong time is an error and not a race. Update tensors without a gradient (frozen) are left alone.
/// Threads: the rank's.
class ShardedOptimizer : public torch::optim::Optimizer {
 public:
  using torch::optim::Optimizer::Optimizer;
  /// Returns the state; allocates it (zeros) if no step was made yet, so that all ranks have the same set of names.
  virtual std::vector<StateTensor> state_tensors() = 0;
  /// Steps done, which enters bias corrections; saved and restored with the state.
  virtual std::int64_t num_steps() const = 0;
  virtual void set_num_steps(std::int64_t steps) = 0;
  /// Sets the learning rate of every parameter group.
  virtual void set_lr(double lr) = 0;
  virtual double lr() const = 0;
};

}  // namespace hypershard::optim
