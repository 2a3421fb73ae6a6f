// Forward hooks for C++ modules, which libtorch lacks.
// They live inside the Impl's forward, because Sequential, AnyModule and ModuleList users call
// Impl::forward and never the holder.
#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>

#include "hypershard/nn/tensor_tree.h"

namespace hypershard::nn {

/// What runs before and after a module's forward.
///
/// The tensors are those found in the arguments and results (see NOTE [tensor trees]), undefined
/// ones too, by pointer, so that a hook may replace them. A replaced input is what the module sees;
/// the caller's own handle changes only if forward takes a non-const reference. Hooks of one module
/// run in the order they were added before, in reverse order after.
///
/// Every hook whose pre_forward returned gets exactly one of post_forward and forward_failed. An
/// exception from a hook leaves forward; a hook that threw is not called again for that forward.
/// Hooks added or removed while a forward runs count from the next one on.
class ForwardHooks {
 public:
  virtual ~ForwardHooks() = default;
  /// Runs before forward and may replace the tensors of its arguments.
  virtual void pre_forward(std::span<at::Tensor* const> inputs) = 0;
  /// Runs after forward and may replace the tensors of its result.
  virtual void post_forward(std::span<at::Tensor* const> outputs) = 0;
  /// Called instead of post_forward if forward, or another hook, threw.
  virtual void forward_failed() noexcept {}
};

/// The part of a module that hooks are added to; found by dynamic_cast.
/// Threads: one at a time, as for modules.
class HookPoint {
 public:
  virtual ~HookPoint() = default;
  void add_forward_hooks(std::shared_ptr<ForwardHooks> hooks) {
    hooks_.push_back(std::move(hooks));
  }
  /// Removes every entry of these hooks; none is no error.
  void remove_forward_hooks(const ForwardHooks* hooks);
  bool has_forward_hooks() const { return !hooks_.empty(); }

 protected:
  HookPoint() = default;
  HookPoint(const HookPoint&) {}  // a clone starts without its original's hooks
  HookPoint& operator=(const HookPoint&) { return *this; }

  /// Runs `body(args...)` between the hooks and returns its result. Costs one branch when there are
  /// none.
  ///
  /// With hooks, `const T&` arguments that hold tensors are copied (handles, not data), so that a
  /// hook can replace them.
  template <class Body, class... Args>
  auto run_hooked(const Body& body, Args&&... args);  // in hooks_inl.h

 private:
  std::vector<std::shared_ptr<ForwardHooks>> hooks_;
};

/// Default base of a hookable module: clone() works if the author overrides reset(), and throws
/// Unsupported if not.
template <class Derived>
class CloneableByReset;  // in hooks_inl.h: derives from torch::nn::Cloneable<Derived>

/// Base of a hookable module: the author writes `forward_impl`, callers call `forward`.
///
///   struct BlockImpl : nn::Hookable<BlockImpl, at::Tensor(at::Tensor)> { at::Tensor
///   forward_impl(at::Tensor x); }; TORCH_MODULE(Block);
///
/// `forward` has exactly the stated signature, so that Sequential and AnyModule accept the module;
/// it takes no default arguments. `Base` replaces the default base, for a module that can not be
/// copied: `torch::nn::Module`.
///
/// NOTE [inherited forward]: libtorch's `AnyModule::get<T>()` and `Sequential::at<T>()` do not
/// compile for a T that inherits its forward; `AnyModule::ptr()` and `Sequential::ptr(i)` do.
template <class Derived, class Signature, class Base = CloneableByReset<Derived>>
class Hookable;  // in hooks_inl.h: derives from Base and HookPoint; public R forward(Args...)

namespace internal {
template <class Forward>
struct SignatureOf;
template <class Impl>
using ForwardSignature = typename SignatureOf<decltype(&Impl::forward)>::Type;
}  // namespace internal

/// Makes an existing Impl hookable without touching it: `using Linear =
/// torch::nn::ModuleHolder<nn::Hooked<torch::nn::LinearImpl>>`.
///
/// Constructors are the Impl's. If Impl::forward is overloaded, `Signature` says which one is
/// meant; the others are hidden. forward takes no default arguments, but Sequential and AnyModule
/// still fill in those that the Impl declares to them.
///
/// NOTE [hidden forward]: forward of the base is hidden, not overridden (it is not virtual in
/// libtorch); a call through `as<LinearImpl>()` bypasses the hooks. The engine reports that by name
/// when the unit's gradient or a resharded parameter shows it.
template <class Impl, class Signature = internal::ForwardSignature<Impl>>
class Hooked;  // in hooks_inl.h

}  // namespace hypershard::nn

#include "hypershard/nn/hooks_inl.h"
