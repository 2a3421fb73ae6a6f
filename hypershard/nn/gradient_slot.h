// Where a parameter's gradient is written, when somebody (the sharding engine) has a place for it.
// A layer that knows the slot writes its weight gradient there itself: no temporary, no zero fill,
// no addition.
#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

namespace hypershard::nn {

/// The place of one parameter's gradient.
///
/// Protocol, in backward: a layer asks slot_of(param). If there is one, `claim()` gives the
/// destination (the parameter's shape, contiguous, dtype of the reduction, no gradient required)
/// and whether to overwrite it (first writer of this accumulation) or add to it; the layer writes
/// it and returns an undefined gradient for the parameter to autograd. The parameter's
/// AccumulateGrad node still runs (with an undefined gradient), which is how the engine knows that
/// the layer is done. Without a slot, or if claim() returns an undefined tensor, the layer returns
/// its gradient the plain way.
///
/// A layer calls claim() once for each use of the parameter and writes all of the destination
/// before it returns. It does not claim when the graph of backward itself is wanted (create_graph):
/// that throws Unsupported. Threads: the thread that runs backward.
class GradientSlot {
 public:
  struct Claim {
    at::Tensor destination;
    bool overwrite = true;
  };
  virtual ~GradientSlot() = default;
  virtual Claim claim() = 0;
};

/// Attaches a slot to a parameter, replacing an earlier one; nullptr detaches.
///
/// Keyed by the parameter's TensorImpl, so every handle of it finds the slot and a clone does not.
/// The table owns neither: the caller keeps the slot, and an entry is forgotten when the parameter
/// or the slot dies. Threads: all functions here may be called concurrently. Errors:
/// InvalidArgument if `param` is undefined.
void set_gradient_slot(const at::Tensor& param, const std::shared_ptr<GradientSlot>& slot);

/// Returns the slot of a parameter or nullptr. Costs an atomic load while no slot exists in the
/// process.
std::shared_ptr<GradientSlot> slot_of(const at::Tensor& param);

namespace internal {

/// Claims the slot of `param` for a layer's backward; an undefined destination means: return the
/// gradient.
///
/// Errors: Unsupported under create_graph; InvalidArgument if the slot's destination does not fit
/// the parameter.
GradientSlot::Claim claim_slot(const at::Tensor& param);

/// Returns the number of entries, dead ones that were not yet swept included.
std::size_t slot_table_size();

}  // namespace internal
}  // namespace hypershard::nn
