// RMSNorm: the operators hypershard::rms_norm_forward and _backward, their autograd function, the
// layer. They are dispatched operators, so that traces and the plan's validation see them like
// ATen's own.
#include "hypershard/nn/rms_norm.h"

#include <cstdint>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "hypershard/core/error.h"
#include "hypershard/nn/gradient_slot.h"
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

at::Tensor inverse_root(const at::Tensor& x, double eps) {
  return at::rsqrt(x.square().mean(-1, /*keepdim=*/true) + eps);
}

// Any device and dtype, differentiable; the oracle of the fused kernels.
std::tuple<at::Tensor, at::Tensor> forward_composite(
    const at::Tensor& x, const at::Tensor& weight, double eps
) {
  const auto wide = widened(x);
  const auto rstd = inverse_root(wide, eps);
  return {(wide * rstd * weight.to(wide.scalar_type())).to(x.scalar_type()), rstd.squeeze(-1)};
}

std::tuple<at::Tensor, at::Tensor> gradients_composite(
    const at::Tensor& grad_y, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& rstd
) {
  const auto wide_grad = widened(grad_y);
  const auto normed = widened(x) * rstd;
  const auto g = wide_grad * weight.to(wide_grad.scalar_type());
  const auto grad_x = (g - normed * (g * normed).mean(-1, /*keepdim=*/true)) * rstd;
  const auto grad_weight = (wide_grad * normed).reshape({-1, weight.numel()}).sum(0);
  return {grad_x.to(x.scalar_type()), grad_weight};
}

void write_gradient(const at::Tensor& destination, const at::Tensor& grad, bool overwrite) {
  if (overwrite) {
    destination.copy_(grad);
  } else {
    destination.add_(grad);
  }
}

at::Tensor backward_composite(
    const at::Tensor& grad_y,
    const at::Tensor& x,
    const at::Tensor& weight,
    const at::Tensor& rstd,
    at::Tensor grad_weight,
    bool overwrite
) {
  const auto [grad_x, grad] = gradients_composite(grad_y, x, weight, rstd.unsqueeze(-1));
  write_gradient(grad_weight, grad, overwrite);
  return grad_x;
}

bool fits_kernel(const at::Tensor& x, const at::Tensor& weight) {
  return internal::is_kernel_dtype(x.scalar_type()) && weight.scalar_type() == x.scalar_type();
}

std::tuple<at::Tensor, at::Tensor> forward_cpu(
    const at::Tensor& x_in, const at::Tensor& weight_in, double eps
) {
  if (!fits_kernel(x_in, weight_in)) {
    return forward_composite(x_in, weight_in, eps);
  }
  const auto x = x_in.contiguous();
  const auto weight = weight_in.contiguous();
  const std::int64_t dim = weight.numel();
  const auto y = at::empty_like(x);
  const auto rstd = at::empty(
      x.sizes().slice(0, x.dim() - 1), x.options().dtype(internal::compute_dtype(x.scalar_type()))
  );
  internal::with_element_type(x.scalar_type(), [&](auto element) {
    using T = decltype(element);
    const internal::RmsNormForward<T> args{
        internal::data_of<T>(x),
        internal::data_of<T>(weight),
        internal::mutable_data_of<T>(y),
        internal::mutable_data_of<internal::Compute<T>>(rstd),
        eps
    };
    internal::for_rows(rstd.numel(), dim, [&](std::int64_t begin, std::int64_t end) {
      internal::run_rms_norm_forward(args, begin, end, dim);
    });
  });
  return {y, rstd};
}

// With several threads each adds up rows of its own, and the sums meet in the order of the rows:
// the same bits every time.
template <class T>
void backward_rows(
    internal::RmsNormBackward<T> args,
    std::int64_t rows,
    std::int64_t dim,
    internal::Compute<T>* total
) {
  using A = internal::Compute<T>;
  const std::int64_t threads = rows * dim <= internal::kGrain ? 1 : at::get_num_threads();
  if (threads == 1) {
    args.grad_weight = total;
    internal::run_rms_norm_backward(args, 0, rows, dim);
    return;
  }
  std::vector<A> partial(static_cast<std::size_t>(threads * dim));
  at::parallel_for(0, threads, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t part = first; part < last; ++part) {
      auto own = args;
      own.grad_weight = partial.data() + part * dim;
      internal::run_rms_norm_backward(own, rows * part / threads, rows * (part + 1) / threads, dim);
    }
  });
  for (std::int64_t part = 0; part < threads; ++part) {
    internal::add_to(total, partial.data() + part * dim, dim);
  }
}

at::Tensor backward_cpu(
    const at::Tensor& grad_in,
    const at::Tensor& x_in,
    const at::Tensor& weight_in,
    const at::Tensor& rstd,
    at::Tensor grad_weight,
    bool overwrite
) {
  if (!fits_kernel(x_in, weight_in) || grad_in.scalar_type() != x_in.scalar_type()) {
    return backward_composite(grad_in, x_in, weight_in, rstd, grad_weight, overwrite);
  }
  const auto grad_y = grad_in.contiguous();
  const auto x = x_in.contiguous();
  const auto weight = weight_in.contiguous();
  const auto sum_dtype = internal::compute_dtype(x.scalar_type());
  const bool in_place = grad_weight.scalar_type() == sum_dtype && grad_weight.is_contiguous();
  const auto total =
      in_place ? grad_weight : at::zeros(weight.sizes(), weight.options().dtype(sum_dtype));
  if (in_place && overwrite) {
    total.zero_();
  }
  const auto grad_x = at::empty_like(x);
  internal::with_element_type(x.scalar_type(), [&](auto element) {
    using T = decltype(element);
    using A = internal::Compute<T>;
    const internal::RmsNormBackward<T> args{
        internal::data_of<T>(grad_y),
        internal::data_of<T>(x),
        internal::data_of<T>(weight),
        internal::data_of<A>(rstd),
        internal::mutable_data_of<T>(grad_x),
        nullptr
    };
    backward_rows(args, rstd.numel(), weight.numel(), internal::mutable_data_of<A>(total));
  });
  if (!in_place) {
    write_gradient(grad_weight, total, overwrite);
  }
  return grad_x;
}

TORCH_LIBRARY_FRAGMENT(hypershard, m) {
  dtensor::register_op_rule("hypershard::rms_norm_forward", internal::rms_norm_forward_rule);
  m.def("rms_norm_forward(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)");
  m.def(
      "rms_norm_backward(Tensor grad_y, Tensor x, Tensor weight, Tensor rstd, Tensor(a!) "
      "grad_weight, bool overwrite) -> Tensor"
  );
}
TORCH_LIBRARY_IMPL(hypershard, CPU, m) {
  m.impl("rms_norm_forward", forward_cpu);
  m.impl("rms_norm_backward", backward_cpu);
}
TORCH_LIBRARY_IMPL(hypershard, CompositeExplicitAutograd, m) {
  m.impl("rms_norm_forward", forward_composite);
  m.impl("rms_norm_backward", backward_composite);
}
TORCH_LIBRARY_IMPL(hypershard, Autograd, m) {
  m.impl("rms_norm_forward", torch::CppFunction::makeFallthrough());
  m.impl("rms_norm_backward", torch::CppFunction::makeFallthrough());
}

std::tuple<at::Tensor, at::Tensor> call_forward(
    const at::Tensor& x, const at::Tensor& weight, double eps
) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("hypershard::rms_norm_forward", "")
                             .typed<decltype(forward_composite)>();
  return op.call(x, weight, eps);
}

at::Tensor call_backward(
    const at::Tensor& grad_y,
    const at::Tensor& x,
    const at::Tensor& weight,
    const at::Tensor& rstd,
    const at::Tensor& grad_weight,
    bool overwrite
) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("hypershard::rms_norm_backward", "")
                             .typed<decltype(backward_composite)>();
  return op.call(grad_y, x, weight, rstd, grad_weight, overwrite);
}

struct RmsNormFunction : torch::autograd::Function<RmsNormFunction> {
  static at::Tensor forward(
      AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight, double eps
  ) {
    auto [y, rstd] = call_forward(x, weight, eps);
    ctx->save_for_backward({x, weight, rstd});
    ctx->saved_data["eps"] = eps;
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto& x = saved[0];
    const auto& weight = saved[1];
    const bool wants_weight = ctx->needs_input_grad(1);
    const auto claim = wants_weight ? internal::claim_slot(weight) : GradientSlot::Claim{};
    if (at::GradMode::is_enabled()) {
      const auto rstd = inverse_root(widened(x), ctx->saved_data.at("eps").toDouble());
      auto [grad_x, grad_weight] = gradients_composite(grads[0], x, weight, rstd);
      return {grad_x, grad_weight.to(weight.scalar_type()), at::Tensor()};
    }
    const bool has_slot = claim.destination.defined();
    const auto grad_weight = has_slot ? claim.destination : at::empty_like(weight);
    const auto grad_x =
        call_backward(grads[0], x, weight, saved[2], grad_weight, !has_slot || claim.overwrite);
    return {grad_x, has_slot || !wants_weight ? at::Tensor() : grad_weight, at::Tensor()};
  }
};

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  HS_CHECK(
      weight.dim() == 1 && x.dim() >= 1 && x.size(-1) == weight.size(0),
      "nn.rms_norm: input of shape ",
      x.sizes(),
      " does not fit weight of shape ",
      weight.sizes(),
      " (expected [..., dim] and [dim])"
  );
  if (!at::GradMode::is_enabled()) {
    return std::get<0>(call_forward(x, weight, eps));
  }
  return RmsNormFunction::apply(x, weight, eps);
}

RmsNormImpl::RmsNormImpl(const RmsNormOptions& options_in) : options(options_in) {
  reset();
}

void RmsNormImpl::reset() {
  HS_CHECK_GE(options.dim, 1, "nn.rms_norm: dim must be positive");
  weight = register_parameter(
      "weight",
      at::ones({options.dim}, at::TensorOptions().device(options.device).dtype(options.dtype))
  );
}

}  // namespace hypershard::nn
