// The templates of hooks.h: how arguments are held while hooks look at them, and the two bases of
// hookable modules. Apart from the contract so that a reader of hooks.h meets no machinery.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>
#include <torch/nn/cloneable.h>

#include "hypershard/nn/hooks.h"

namespace hypershard::nn {
namespace internal {

using TensorPointers = c10::SmallVector<at::Tensor*, 8>;

/// One forward between its hooks; the destructor tells the hooks of a failure unless finish() ended
/// well.
class HookedCall {
 public:
  explicit HookedCall(const std::vector<std::shared_ptr<ForwardHooks>>& hooks) : hooks_(hooks) {}
  HookedCall(const HookedCall&) = delete;
  HookedCall& operator=(const HookedCall&) = delete;
  ~HookedCall();

  void begin(std::span<at::Tensor* const> inputs);
  void finish(std::span<at::Tensor* const> outputs);

 private:
  std::vector<std::shared_ptr<ForwardHooks>> hooks_;  // a copy: hooks may add and remove hooks
  std::size_t begun_ = 0;
};

/// An argument as run_hooked keeps it: in place where the module owns it or may change it.
template <class Arg>
class HeldArgument {
 public:
  explicit HeldArgument(Arg&& arg) : arg_(std::forward<Arg>(arg)) {}
  template <class F>
  void visit(const F& f) {
    visit_tensors(arg_, f);
  }
  Arg&& pass() { return std::forward<Arg>(arg_); }

 private:
  Arg&& arg_;
};

/// A tree that the module must not change: its handles are copied.
template <class T>
class CopiedArgument {
 public:
  explicit CopiedArgument(const T& arg) : arg_(arg) {}
  template <class F>
  void visit(const F& f) {
    visit_tensors(arg_, f);
  }
  const T& pass() { return arg_; }

 private:
  T arg_;
};

/// A view of tensors that somebody else keeps.
class ListArgument {
 public:
  explicit ListArgument(at::TensorList arg) : tensors_(arg.vec()) {}
  template <class F>
  void visit(const F& f) {
    visit_tensors(tensors_, f);
  }
  at::TensorList pass() { return tensors_; }

 private:
  std::vector<at::Tensor> tensors_;
};

template <class Arg>
auto hold_argument(Arg&& arg) {
  using T = std::remove_reference_t<Arg>;
  using Plain = std::remove_const_t<T>;
  if constexpr (std::is_same_v<Plain, at::TensorList>) {
    return ListArgument(arg);
  } else if constexpr (std::is_const_v<T> && kHoldsTensors<Plain>) {
    return CopiedArgument<Plain>(arg);
  } else {
    return HeldArgument<Arg>(std::forward<Arg>(arg));
  }
}

template <class Result, class Body, class... Held>
Result run_between(HookedCall& call, const Body& body, Held... held) {
  {
    TensorPointers inputs;
    const auto collect = [&inputs](at::Tensor& tensor) { inputs.push_back(&tensor); };
    (held.visit(collect), ...);
    call.begin(inputs);
  }
  if constexpr (std::is_void_v<Result>) {
    body(held.pass()...);
    call.finish({});
  } else {
    Result result = body(held.pass()...);
    TensorPointers outputs;
    visit_tensors(result, [&outputs](at::Tensor& tensor) { outputs.push_back(&tensor); });
    call.finish(outputs);
    return result;
  }
}

[[noreturn]] void fail_without_reset(const torch::nn::Module& module);

template <class R, class C, class... Args>
struct SignatureOf<R (C::*)(Args...)> {
  using Type = R(Args...);
};
template <class R, class C, class... Args>
struct SignatureOf<R (C::*)(Args...) const> {
  using Type = R(Args...);
};
template <class R, class C, class... Args>
struct SignatureOf<R (C::*)(Args...) noexcept> {
  using Type = R(Args...);
};
template <class R, class C, class... Args>
struct SignatureOf<R (C::*)(Args...) const noexcept> {
  using Type = R(Args...);
};

}  // namespace internal

template <class Body, class... Args>
auto HookPoint::run_hooked(const Body& body, Args&&... args) {
  using Result = decltype(body(std::forward<Args>(args)...));
  static_assert(
      !std::is_reference_v<Result>,
      "a hookable forward returns by value, so that hooks can replace the tensors of its result"
  );
  if (hooks_.empty()) [[likely]] {
    return body(std::forward<Args>(args)...);
  }
  internal::HookedCall call(hooks_);
  return internal::run_between<Result>(
      call, body, internal::hold_argument<Args>(std::forward<Args>(args))...
  );
}

template <class Derived>
class CloneableByReset : public torch::nn::Cloneable<Derived> {
 public:
  using torch::nn::Cloneable<Derived>::Cloneable;
  void reset() override { internal::fail_without_reset(*this); }
};

template <class Derived, class R, class... Args, class Base>
class Hookable<Derived, R(Args...), Base> : public Base, public HookPoint {
 public:
  using Base::Base;

  R forward(Args... args) {
    return run_hooked(
        [this](auto&&... held) -> R {
          return static_cast<Derived&>(*this).forward_impl(std::forward<decltype(held)>(held)...);
        },
        std::forward<Args>(args)...
    );
  }
};

template <class Impl, class R, class... Args>
class Hooked<Impl, R(Args...)> : public Impl, public HookPoint {
 public:
  using Impl::Impl;
  explicit Hooked(const Impl& impl) : Impl(impl) {}

  R forward(Args... args) {
    return run_hooked(
        [this](auto&&... held) -> R {
          return Impl::forward(std::forward<decltype(held)>(held)...);
        },
        std::forward<Args>(args)...
    );
  }

  // The Impl's own clone() makes an Impl; its tensors and children move into a module of our type.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt
  ) const override {
    return std::make_shared<Hooked>(dynamic_cast<const Impl&>(*Impl::clone(device)));
  }
};

}  // namespace hypershard::nn
