// Optimizers over the update parameters of a sharded model.
// They are torch::optim::Optimizers, so that libtorch's learning-rate schedulers drive them; the
// arithmetic is ATen's fused kernels on flat slices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include "hypershard/shard/fully_shard.h"

namespace hypershard::optim {

/// One tensor of optimizer state, lying like the update tensor it belongs to.
struct StateTensor {
  std::string name;    ///< `exp_avg`, `exp_avg_sq`, `momentum_buffer`
  std::size_t update;  ///< index into ShardedModel::update_parameters()
  at::Tensor tensor;   ///< 1-D, as long as the update tensor; zero where that is padding
};

/// Base of our optimizers: what checkpoints and reports need beside step().
///
/// step() calls ShardedModel::begin_update() before it writes, so that a step at a wrong time is an
/// error and not a race. Update tensors without a gradient (frozen) are left alone, decay included,
/// and keep a step count of their own for the day they are unfrozen. State is as large as what it
/// belongs to and exists from the first step on; before that it is zero and takes no memory.
/// Memory:  holds the update tensors, and so the model's planes.
/// Threads: the rank's.
class ShardedOptimizer : public torch::optim::Optimizer {
 public:
  using torch::optim::Optimizer::Optimizer;

  /// Returns the rule's name, such as `adamw`; a checkpoint refuses the state of another rule.
  virtual std::string kind() const = 0;
  /// Returns the state of every update tensor that was ever stepped, in the order of
  /// update_parameters(); allocates it (zeros) where only the count is known. Which logical
  /// parameters have state is the same on all ranks.
  virtual std::vector<StateTensor> state_tensors() = 0;
  /// Names the state that an update tensor has once it is stepped.
  virtual std::vector<std::string> state_names(std::size_t update) const = 0;

  /// Returns how often step() ran.
  virtual std::int64_t num_steps() const = 0;
  /// Sets that count, and with it the count of every update tensor, which enters bias corrections.
  /// State is kept, but 0 forgets it. Errors: InvalidArgument if negative.
  virtual void set_num_steps(std::int64_t steps) = 0;
  /// Returns the steps done on each update tensor, in the order of update_parameters().
  virtual std::vector<std::int64_t> update_steps() const = 0;
  /// Starts from what a checkpoint says: the counts are set and all state is zero until it is
  /// written. Errors: InvalidArgument for a negative count or a wrong number of them.
  virtual void restore_steps(
      std::int64_t num_steps, const std::vector<std::int64_t>& update_steps
  ) = 0;

  /// Sets the learning rate of every parameter group.
  virtual void set_lr(double lr) = 0;
  /// Returns the learning rate of the first parameter group.
  virtual double lr() const = 0;

  /// On: each unit is updated inside backward, as soon as its gradient is reduced. step() then only
  /// counts the step.
  ///
  /// Saves the memory of all reduced gradients and a pass over them; what ranks would spend waiting
  /// for each other goes into updates. The bits are those of a step after backward. The learning
  /// rate of a step must be set before its backward; gradients cannot be clipped or looked at, and
  /// a backward that fails leaves weights of two steps, which the next forward refuses. Every
  /// backward that reduces over all axes updates: where several micro-batches of a step do, turn it
  /// on for the last. Whoever writes update tensors by hand after it calls sync_runtime(). Call
  /// between backwards.
  /// Errors: InvalidArgument if another optimizer updates this model in backward.
  virtual void step_in_backward(bool on) = 0;

  /// Refused: torch's archives know neither shards nor logical names.
  /// Errors: Unsupported, always.
  void save(torch::serialize::OutputArchive& archive) const final;
  void load(torch::serialize::InputArchive& archive) final;
};

}  // namespace hypershard::optim
