// The linear layer and its autograd function.
#include "hypershard/nn/linear.h"

#include <cmath>
#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/sum.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/custom_function.h>

#include "hypershard/core/error.h"
#include "hypershard/nn/gradient_slot.h"
#include "hypershard/nn/internal/matmul.h"

namespace hypershard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The rows are counted here: where this rank has no columns, -1 would not tell how many there are.
at::Tensor as_matrix(const at::Tensor& tensor) {
  const auto rows = tensor.sizes().slice(0, static_cast<std::size_t>(tensor.dim() - 1));
  return tensor.reshape({c10::multiply_integers(rows), tensor.size(-1)});
}

/// The gradient of the weight, or nothing if it went into the weight's slot. Matrices: grad_y
/// [rows, out], x [rows, in].
at::Tensor weight_gradient(
    const at::Tensor& weight, const at::Tensor& grad_y, const at::Tensor& x
) {
  const auto claim = internal::claim_slot(weight);
  if (claim.destination.defined()) {
    internal::transposed_product_into(claim.destination, grad_y, x, claim.overwrite);
    return {};
  }
  return internal::transposed_product(grad_y, x);
}

at::Tensor bias_gradient(const at::Tensor& bias, const at::Tensor& grad_y) {
  auto claim = internal::claim_slot(bias);
  if (!claim.destination.defined()) {
    return grad_y.sum(0);
  }
  const auto dtype = claim.destination.scalar_type();
  if (claim.overwrite) {
    at::sum_out(claim.destination, grad_y, 0, /*keepdim=*/false, dtype);
  } else {
    claim.destination.add_(grad_y.sum(0, /*keepdim=*/false, dtype));
  }
  return {};
}

struct LinearFunction : torch::autograd::Function<LinearFunction> {
  // An absent bias is no tensor to autograd: libtorch can not take undefined ones here.
  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& x,
      const at::Tensor& weight,
      const std::optional<at::Tensor>& bias
  ) {
    ctx->save_for_backward({x, weight, bias.value_or(at::Tensor())});
    return internal::affine(x, weight, bias.value_or(at::Tensor()));
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto& x = saved[0];
    const auto& weight = saved[1];
    const auto& bias = saved[2];
    const auto grad_y = as_matrix(grads[0]);
    variable_list result(3);
    if (ctx->needs_input_grad(1)) {
      result[1] = weight_gradient(weight, grad_y, as_matrix(x));
    }
    if (bias.defined() && ctx->needs_input_grad(2)) {
      result[2] = bias_gradient(bias, grad_y);
    }
    if (ctx->needs_input_grad(0)) {
      // No view: its base would stay alive, and nobody could reduce the gradient where it lies.
      result[0] = at::_unsafe_view(internal::product(grad_y, weight), x.sizes());
    }
    return result;
  }
};

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  HS_CHECK(
      weight.dim() == 2 && x.dim() >= 1 && x.size(-1) == weight.size(1) &&
          (!bias.defined() || (bias.dim() == 1 && bias.size(0) == weight.size(0))),
      "nn.linear: input of shape ",
      x.sizes(),
      " does not fit weight of shape ",
      weight.sizes(),
      " (expected [..., in], [out, in] and a bias of [out])"
  );
  if (!at::GradMode::is_enabled()) {
    return internal::affine(x, weight, bias);
  }
  return LinearFunction::apply(x, weight, bias.defined() ? std::optional(bias) : std::nullopt);
}

LinearImpl::LinearImpl(const LinearOptions& options_in) : options(options_in) {
  reset();
}

void LinearImpl::reset() {
  HS_CHECK(
      options.in > 0 && options.out > 0,
      "nn.linear: in and out must be positive (got in ",
      options.in,
      ", out ",
      options.out,
      ")"
  );
  const auto tensor_options = at::TensorOptions().device(options.device).dtype(options.dtype);
  weight = register_parameter("weight", at::empty({options.out, options.in}, tensor_options));
  if (options.bias) {
    bias = register_parameter("bias", at::empty({options.out}, tensor_options));
  }
  if (options.initialize && !weight.is_meta()) {
    const at::NoGradGuard no_grad;
    const double bound = 1 / std::sqrt(static_cast<double>(options.in));
    for (auto& parameter : parameters(/*recurse=*/false)) {
      parameter.uniform_(-bound, bound);
    }
  }
}

}  // namespace hypershard::nn
