// What AdamW, SGD and their like share: the walk over flat update tensors, step counts and state.
// A rule adds its options and one fused kernel call over lists of tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/optim/optimizer.h"

namespace hypershard::shard {
class Unit;
}

namespace hypershard::optim {

/// Base of optimizers whose update of an element depends on that element's gradient and state
/// alone, so that stepping slices is stepping the whole.
///
/// There are always two parameter groups, on every rank: 0 holds the families that decay, 1 all
/// others; either may be empty. Their options are torch's own for the rule and may be changed
/// between steps; schedulers do the same. Groups added later may hold update tensors only.
class ElementwiseOptimizer : public ShardedOptimizer {
 public:
  /// Calls `closure` (if any) with gradients enabled, then updates; returns the closure's loss.
  /// Errors: InvalidArgument if update parameters may not be written now, or for a group that holds
  /// other tensors, the same twice, or options that are out of range.
  at::Tensor step(LossClosure closure = nullptr) override;

  void step_in_backward(bool on) override;
  std::vector<StateTensor> state_tensors() override;
  std::vector<std::string> state_names(std::size_t update) const override;
  std::int64_t num_steps() const override { return num_steps_; }
  void set_num_steps(std::int64_t steps) override;
  std::vector<std::int64_t> update_steps() const override { return steps_; }
  void restore_steps(std::int64_t num_steps, const std::vector<std::int64_t>& update_steps)
      override;
  void set_lr(double lr) override;
  double lr() const override;

 protected:
  using Options = torch::optim::OptimizerOptions;

  /// Lists of equal length for one kernel call: tensors of one dtype and one group.
  struct Batch {
    std::vector<at::Tensor> params;
    std::vector<at::Tensor> grads;
    std::vector<std::vector<at::Tensor>> state;  ///< a list for each name of state_names_of()
    std::vector<at::Tensor> steps;               ///< 0-dim fp32, this step counted: the first is 1
  };

  /// Errors: InvalidArgument for a family in `decay_families` that no parameter has.
  ElementwiseOptimizer(
      shard::ShardedModel model,
      const std::vector<std::string>& decay_families,
      const Options& decayed,
      const Options& undecayed
  );
  ~ElementwiseOptimizer() override;
  ElementwiseOptimizer(const ElementwiseOptimizer&) = delete;
  ElementwiseOptimizer& operator=(const ElementwiseOptimizer&) = delete;

  /// Throws InvalidArgument or Unsupported unless `options` are this rule's and in range.
  virtual void check_options(const Options& options) const = 0;
  /// Names the state that the rule keeps under `options`.
  virtual std::vector<std::string> state_names_of(const Options& options) const = 0;
  /// Runs the kernel. No list is empty.
  virtual void apply(const Options& options, Batch& batch) const = 0;

 private:
  std::size_t index_of(const at::Tensor& tensor) const;
  void update_unit(const shard::Unit& unit);
  void find_options();
  void step_range(std::size_t begin, std::size_t end);
  void add_to_batch(Batch& batch, std::size_t update, const at::Tensor& step);
  void ensure_state(std::size_t update, const std::vector<std::string>& names);
  const Options* options_of(std::size_t update) const;

  /// The state of one update tensor; empty before its first step.
  struct State {
    std::vector<std::string> names;
    std::vector<at::Tensor> tensors;
  };

  shard::ShardedModel model_;
  std::vector<shard::UpdateTensor> updates_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> index_;
  std::vector<State> updates_state_;
  std::vector<std::int64_t> steps_;
  std::int64_t num_steps_ = 0;

  bool steps_in_backward_ = false;
  std::vector<const Options*> options_;   ///< by update tensor; empty between steps
  std::vector<std::size_t> unit_begins_;  ///< first update tensor of each unit, and their number
};

}  // namespace hypershard::optim
