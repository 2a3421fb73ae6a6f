// Activation recompute: forget a segment's activations, run it again in backward.
// libtorch's saved-tensor hooks are Python objects, so this is a re-entrant autograd function of its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

namespace hypershard::nn {

/// Told when a segment's second life begins and ends.
class RecomputeObserver {
 public:
  virtual ~RecomputeObserver() = default;
  /// Runs in the outer backward's graph task, before the segment is run again.
  virtual void before_recompute() = 0;
  /// Runs in the outer graph task after the segment's own backward ended (also when it threw).
  virtual void after_recompute() noexcept = 0;
};

/// One call of recompute(), alive as long as its backward may come.
class RecomputeSegment {
 public:
  virtual ~RecomputeSegment() = default;
  /// Adds an observer; the same pointer added twice counts once.
  virtual void add_observer(std::shared_ptr<RecomputeObserver> observer) = 0;
};

/// Returns the innermost segment whose first forward runs on this thread now, or nullptr.
RecomputeSegment* current_recompute_segment();
/// Tells whether this thread is running a segment's second forward now.
bool in_second_forward();

using TensorsFn = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// Runs `fn(inputs)` without keeping activations; in backward runs it again, with the random state of the first time, and differentiates that.
///
/// Memory:  keeps the inputs and the random state only.
/// Threads: backward must run on the thread that ran forward (as on CPU).
/// Errors:  InvalidArgument if the second run gives another number of outputs, shapes or dtypes than the first (names which).
/// If no input requires a gradient but parameters inside do, gradients still flow (a dummy input carries them). Without grad mode it just runs `fn`.
/// Source: Chen et al. 2016, arXiv 1604.06174.
std::vector<at::Tensor> recompute(TensorsFn fn, const std::vector<at::Tensor>& inputs);
/// The same for one tensor in and out.
at::Tensor recompute(std::function<at::Tensor(const at::Tensor&)> fn, const at::Tensor& input);

}  // namespace hypershard::nn
