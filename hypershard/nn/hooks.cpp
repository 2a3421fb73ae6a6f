// The part of the hooks that does not depend on a module's signature.
#include "hypershard/nn/hooks.h"

#include <cstddef>
#include <memory>
#include <span>

#include "hypershard/core/error.h"

namespace hypershard::nn {

void HookPoint::remove_forward_hooks(const ForwardHooks* hooks) {
  std::erase_if(hooks_, [hooks](const auto& added) { return added.get() == hooks; });
}

namespace internal {

void HookedCall::begin(std::span<at::Tensor* const> inputs) {
  for (const auto& hook : hooks_) {
    hook->pre_forward(inputs);
    ++begun_;
  }
}

void HookedCall::finish(std::span<at::Tensor* const> outputs) {
  while (begun_ > 0) {
    hooks_[--begun_]->post_forward(outputs);
  }
}

HookedCall::~HookedCall() {
  while (begun_ > 0) {
    hooks_[--begun_]->forward_failed();
  }
}

void fail_without_reset(const torch::nn::Module& module) {
  HS_FAIL(
      Unsupported,
      "nn.hooks: module of type '",
      module.name(),
      "' has no reset(), so clone() does not know how to build it",
      HS_HINT("override reset() and register parameters, buffers and submodules there")
  );
}

}  // namespace internal
}  // namespace hypershard::nn
