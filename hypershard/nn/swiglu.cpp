// SwiGLU: the operators hypershard::swiglu_forward and _backward and their autograd function.
// They are dispatched operators, so that traces and the plan's validation see them like ATen's own.
#include "hypershard/nn/swiglu.h"

#include <cstdint>
#include <tuple>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sigmoid.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "hypershard/core/error.h"
#include "hypershard/nn/internal/cpu_kernels.h"
#include "hypershard/nn/internal/kernel_call.h"
#include "hypershard/nn/internal/layer_rules.h"

namespace hypershard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor widened(const at::Tensor& tensor) {
  return tensor.to(internal::compute_dtype(tensor.scalar_type()));
}

// Any device and dtype, differentiable; the oracle of the fused kernels.
at::Tensor forward_composite(const at::Tensor& gate, const at::Tensor& up) {
  const auto wide = widened(gate);
  return (wide * at::sigmoid(wide) * widened(up)).to(gate.scalar_type());
}

std::tuple<at::Tensor, at::Tensor> backward_composite(
    const at::Tensor& grad_h, const at::Tensor& gate, const at::Tensor& up
) {
  const auto wide = widened(gate);
  const auto grad = widened(grad_h);
  const auto s = at::sigmoid(wide);
  const auto silu = wide * s;
  return {
      (grad * widened(up) * (s + silu * (1 - s))).to(gate.scalar_type()),
      (grad * silu).to(gate.scalar_type())
  };
}

at::Tensor forward_cpu(const at::Tensor& gate_in, const at::Tensor& up_in) {
  if (!internal::is_kernel_dtype(gate_in.scalar_type())) {
    return forward_composite(gate_in, up_in);
  }
  const auto gate = gate_in.contiguous();
  const auto up = up_in.contiguous();
  const auto h = at::empty_like(gate);
  internal::with_element_type(gate.scalar_type(), [&](auto element) {
    using T = decltype(element);
    const internal::SwigluForward<T> args{
        internal::data_of<T>(gate), internal::data_of<T>(up), internal::mutable_data_of<T>(h)
    };
    internal::for_rows(h.numel(), 1, [&](std::int64_t begin, std::int64_t end) {
      internal::run_swiglu_forward(args, begin, end);
    });
  });
  return h;
}

std::tuple<at::Tensor, at::Tensor> backward_cpu(
    const at::Tensor& grad_in, const at::Tensor& gate_in, const at::Tensor& up_in
) {
  if (!internal::is_kernel_dtype(gate_in.scalar_type()) ||
      grad_in.scalar_type() != gate_in.scalar_type()) {
    return backward_composite(grad_in, gate_in, up_in);
  }
  const auto grad_h = grad_in.contiguous();
  const auto gate = gate_in.contiguous();
  const auto up = up_in.contiguous();
  auto grad_gate = at::empty_like(gate);
  auto grad_up = at::empty_like(up);
  internal::with_element_type(gate.scalar_type(), [&](auto element) {
    using T = decltype(element);
    const internal::SwigluBackward<T> args{
        internal::data_of<T>(grad_h),
        internal::data_of<T>(gate),
        internal::data_of<T>(up),
        internal::mutable_data_of<T>(grad_gate),
        internal::mutable_data_of<T>(grad_up)
    };
    internal::for_rows(gate.numel(), 1, [&](std::int64_t begin, std::int64_t end) {
      internal::run_swiglu_backward(args, begin, end);
    });
  });
  return {grad_gate, grad_up};
}

TORCH_LIBRARY_FRAGMENT(hypershard, m) {
  dtensor::register_op_rule("hypershard::swiglu_forward", internal::swiglu_forward_rule);
  m.def("swiglu_forward(Tensor gate, Tensor up) -> Tensor");
  m.def("swiglu_backward(Tensor grad_h, Tensor gate, Tensor up) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(hypershard, CPU, m) {
  m.impl("swiglu_forward", forward_cpu);
  m.impl("swiglu_backward", backward_cpu);
}
TORCH_LIBRARY_IMPL(hypershard, CompositeExplicitAutograd, m) {
  m.impl("swiglu_forward", forward_composite);
  m.impl("swiglu_backward", backward_composite);
}
TORCH_LIBRARY_IMPL(hypershard, Autograd, m) {
  m.impl("swiglu_forward", torch::CppFunction::makeFallthrough());
  m.impl("swiglu_backward", torch::CppFunction::makeFallthrough());
}

at::Tensor call_forward(const at::Tensor& gate, const at::Tensor& up) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("hypershard::swiglu_forward", "")
                             .typed<decltype(forward_composite)>();
  return op.call(gate, up);
}

std::tuple<at::Tensor, at::Tensor> call_backward(
    const at::Tensor& grad_h, const at::Tensor& gate, const at::Tensor& up
) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("hypershard::swiglu_backward", "")
                             .typed<decltype(backward_composite)>();
  return op.call(grad_h, gate, up);
}

struct SwigluFunction : torch::autograd::Function<SwigluFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gate, const at::Tensor& up) {
    ctx->save_for_backward({gate, up});
    return call_forward(gate, up);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    auto [grad_gate, grad_up] = at::GradMode::is_enabled()
                                    ? backward_composite(grads[0], saved[0], saved[1])
                                    : call_backward(grads[0], saved[0], saved[1]);
    return {grad_gate, grad_up};
  }
};

}  // namespace

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  HS_CHECK(
      gate.sizes() == up.sizes() && gate.scalar_type() == up.scalar_type(),
      "nn.swiglu: gate and up differ: ",
      gate.scalar_type(),
      gate.sizes(),
      " and ",
      up.scalar_type(),
      up.sizes()
  );
  if (!at::GradMode::is_enabled()) {
    return call_forward(gate, up);
  }
  return SwigluFunction::apply(gate, up);
}

}  // namespace hypershard::nn
