// Forward hooks for C++ modules, which libtorch lacks.
// They live inside the Impl's forward, because Sequential, AnyModule and ModuleList users call Impl::forward and never the holder.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "hypershard/nn/tensor_tree.h"

namespace hypershard::nn {

/// What runs before and after a module's forward.
///
/// The tensors are those found in the arguments and results (nested vectors, tuples, pairs, optionals, maps), by pointer, so that a hook may replace them.
/// Hooks of one module run in the order they were added before, in reverse order after. An exception from a hook leaves forward.
class ForwardHooks {
 public:
  virtual ~ForwardHooks() = default;
  virtual void pre_forward(std::span<at::Tensor* const> inputs) = 0;
  virtual void post_forward(std::span<at::Tensor* const> outputs) = 0;
  /// Called instead of post_forward if forward threw.
  virtual void forward_failed() noexcept {}
};

/// The part of a module that hooks are added to; found by dynamic_cast.
/// Threads: one at a time, as for modules.
class HookPoint {
 public:
  virtual ~HookPoint() = default;
  void add_forward_hooks(std::shared_ptr<ForwardHooks> hooks) { hooks_.push_back(std::move(hooks)); }
  void remove_forward_hooks(const ForwardHooks* hooks);
  bool has_forward_hooks() const { return !hooks_.empty(); }

 protected:
  HookPoint() = default;
  HookPoint(const HookPoint&) {}  // a clone starts without its original's hooks
  HookPoint& operator=(const HookPoint&) { return *this; }

  /// Runs `body` between the hooks. Costs one branch when there are none.
  template <class Body, class... Args>
  auto run_hooked(Body&& body, Args&&... args);  // in hooks_inl.h

 private:
  void run_pre(std::span<at::Tensor* const> inputs);
  void run_post(std::span<at::Tensor* const> outputs);
  void run_failed() noexcept;

  std::vector<std::shared_ptr<ForwardHooks>> hooks_;
};

/// Base of a hookable module: the author writes `forward_impl`, callers call `forward`.
///
///   struct BlockImpl : nn::Hookable<BlockImpl, at::Tensor(at::Tensor)> { at::Tensor forward_impl(at::Tensor x); void reset() override; };
///
/// `forward` has exactly the stated signature, so that Sequential and AnyModule accept the module.
template <class Derived, class Signature>
class Hookable;  // in hooks_inl.h: derives from torch::nn::Module and HookPoint; public R forward(Args...)

/// Makes an existing Impl hookable without touching it: `using Linear = torch::nn::ModuleHolder<nn::Hooked<torch::nn::LinearImpl>>`.
///
/// NOTE [hidden forward]: forward of the base is hidden, not overridden (it is not virtual in libtorch); a call through `as<LinearImpl>()` bypasses
/// the hooks. The engine reports that by name when the unit's gradient or a resharded parameter shows it.
template <class Impl>
class Hooked;  // in hooks_inl.h

}  // namespace hypershard::nn

#include "hypershard/nn/hooks_inl.h"
