// Activation recompute: forget a segment's activations, run it again in backward.
// libtorch's saved-tensor hooks are Python objects, so this is a re-entrant autograd function of
// its own.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace hypershard::nn {

/// Told when a segment's second life begins and ends.
///
/// An observer whose before_recompute returned gets exactly one after_recompute. If no gradient
/// reaches the segment's outputs, there is no second life and neither is called.
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
  /// Adds an observer; the same pointer added twice counts once. Observers begin in the order they
  /// were added and end in reverse order, at every backward through the segment (twice with
  /// retain_graph).
  virtual void add_observer(std::shared_ptr<RecomputeObserver> observer) = 0;
};

/// Returns the innermost segment whose first forward runs on this thread now, or nullptr.
///
/// A segment nested in another one has its first forward anew each time the outer one is run: then
/// this returns the nested segment while in_second_forward() is true. Whoever asks both asks this
/// one first.
RecomputeSegment* current_recompute_segment();
/// Tells whether this thread is running a segment's second forward now.
bool in_second_forward();
/// Counts the segments that recompute() has begun on this thread in grad mode; two readings tell
/// whether one began in between.
std::int64_t num_recompute_segments();

using TensorsFn = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// Runs `fn(inputs)` without keeping activations; in backward runs it again, with the random state
/// and autocast setting of the first time, and differentiates that.
///
/// Inputs may be undefined or of any dtype. Every floating point output counts as requiring a
/// gradient; one that turns out not to in the second run passes none on. If no input requires a
/// gradient but parameters inside do, gradients still flow (an empty extra input carries them).
/// Without grad mode it just runs `fn`. Gradients equal those of the plain run bit for bit, as long
/// as `fn` computes the same again and every parameter is used in one segment only (sums are formed
/// per segment).
///
/// Memory:  keeps the inputs and the random state only. `fn` lives as long as the graph.
/// Threads: backward must run on the thread that ran forward (as on CPU).
/// Errors:  InvalidArgument if the second run gives another number of outputs, shapes or dtypes
/// than the first (names which),
///          or if `fn` changes an input in place; c10::Error if an input was changed in place
///          between forward and backward; Unsupported under create_graph and with autograd::grad(),
///          whose gradients would land in the parameters.
/// Source:  Chen et al. 2016, arXiv 1604.06174.
std::vector<at::Tensor> recompute(TensorsFn fn, const std::vector<at::Tensor>& inputs);
/// The same for one tensor in and out.
at::Tensor recompute(std::function<at::Tensor(const at::Tensor&)> fn, const at::Tensor& input);

}  // namespace hypershard::nn
