// The few seams of libtorch's autograd that the engine uses, so that one source file pays for
// including it.
#pragma once

#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>

namespace hypershard::shard::internal {

/// What a hook calls: made once, shared by the hooks of all steps.
using Event = std::shared_ptr<const std::function<void()>>;

/// Runs `event` each time a backward reaches the node that produced `tensor`, before that node.
///
/// A view's base is hooked too: an in-place change of the view later replaces the view's node, but
/// never the one that made its base. No effect on leaves and constants.
void before_backward_of(const at::Tensor& tensor, const Event& event);

/// Runs `hook` with each gradient that reaches the leaf, undefined ones included, instead of
/// accumulating it in `leaf.grad()`. Returns what keeps the hook in place; the hook stays until its
/// owner and the graph let go.
std::shared_ptr<void> take_gradients_of(
    const at::Tensor& leaf, std::function<void(const at::Tensor&)> hook
);

/// Runs `callback` when the backward that runs on this thread has ended (the innermost, if
/// re-entrant).
void at_end_of_backward(std::function<void()> callback);

/// Tells whether a backward runs on this thread.
bool backward_is_running();

}  // namespace hypershard::shard::internal
