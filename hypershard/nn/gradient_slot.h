// Where a parameter's gradient is written, when somebody (the sharding engine) has a place for it.
// A layer that knows the slot writes its weight gradient there itself: no temporary, no zero fill, no addition.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace hypershard::nn {

/// The place of one parameter's gradient.
///
/// Protocol, in backward: a layer asks slot_of(param). If there is one, `claim()` gives the destination (the parameter's shape, contiguous, dtype of the reduction)
/// and whether to overwrite it (first writer of this accumulation) or add to it; the layer writes it and returns an undefined gradient for the parameter to
/// autograd. The parameter's AccumulateGrad node still runs (with an undefined gradient), which is how the engine knows that the layer is done.
/// Without a slot, or if claim() returns an undefined tensor, the layer returns its gradient the plain way.
/// Threads: the backward thread only.
class GradientSlot {
 public:
  struct Claim {
    at::Tensor destination;
    bool overwrite = true;
  };
  virtual ~GradientSlot() = default;
  virtual Claim claim() = 0;
};

/// Attaches a slot to a parameter (by its TensorImpl; forgotten when either dies). Replaces an earlier one; nullptr detaches.
void set_gradient_slot(const at::Tensor& param, std::shared_ptr<GradientSlot> slot);
/// Returns the slot of a parameter or nullptr.
std::shared_ptr<GradientSlot> slot_of(const at::Tensor& param);

}  // namespace hypershard::nn
