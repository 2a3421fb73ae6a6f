// Matrix products in the precision that this machine multiplies fast, into destinations of the
// caller's.
#include "hypershard/nn/internal/matmul.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include "hypershard/nn/internal/layer_rules.h"
#include "hypershard/nn/internal/weight_gradient_kernel.h"

namespace hypershard::nn::internal {
namespace {

bool has_bf16_hardware() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16") != 0;
#else
  return true;
#endif
}

bool is_amd() {
#if defined(__x86_64__)
  return __builtin_cpu_is("amd") != 0 && __builtin_cpu_supports("avx2") != 0;
#else
  return false;
#endif
}

bool is_large_fp32(
    const at::Tensor& operand, std::int64_t rows, std::int64_t columns, std::int64_t depth
) {
  constexpr double kWorthwhile = 1 << 24;
  // Under create_graph the product must be one that autograd knows.
  return !at::GradMode::is_enabled() && operand.device().is_cpu() &&
         operand.scalar_type() == at::kFloat &&
         static_cast<double>(rows) * static_cast<double>(columns) * static_cast<double>(depth) >=
             kWorthwhile;
}

/// NOTE [products by oneDNN]: libtorch multiplies fp32 matrices with MKL, which runs processors
/// other than Intel's on kernels that here take 1 to 32 % longer than those of oneDNN, which the
/// same libtorch has. Measured on Zen 4, one core, 32 to 1024 rows by 512 to 8192; below about
/// 2^24 multiplications oneDNN's fixed costs are more than it gains.
bool multiplies_by_onednn(const at::Tensor& a, std::int64_t rows, std::int64_t columns) {
  static const bool is_better = is_amd() && at::globalContext().hasMKLDNN();
  return is_better && is_large_fp32(a, rows, columns, a.size(-1));
}

/// Tells whether multiply_transposed() beats the library; it has no threads of its own.
bool multiplies_here(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
  static const bool is_better = is_amd();
  return is_better && at::get_num_threads() == 1 && out.scalar_type() == at::kFloat &&
         is_large_fp32(a, a.size(1), b.size(1), a.size(0)) && a.is_contiguous() &&
         b.is_contiguous() && out.is_contiguous();
}

void multiply_here(
    const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool overwrite
) {
  const at::Tensor panels =
      at::empty({panel_numel(a.size(0), a.size(1), b.size(1))}, a.options().requires_grad(false));
  multiply_transposed(
      a.const_data_ptr<float>(),
      b.const_data_ptr<float>(),
      out.mutable_data_ptr<float>(),
      a.size(0),
      a.size(1),
      b.size(1),
      overwrite,
      panels.mutable_data_ptr<float>()
  );
}

// The operator is libtorch's, so its rule stands with its one caller.
[[maybe_unused]] const bool kHasRule = [] {
  dtensor::register_op_rule("mkldnn::_linear_pointwise", fast_linear_rule);
  return true;
}();

/// Returns x weight^T + bias by oneDNN; `weight` may be the transpose of a contiguous matrix.
at::Tensor affine_by_onednn(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias
) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("mkldnn::_linear_pointwise", "");
  // Below the tracking of views too: the result is one inside, and its base would stay alive.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  torch::jit::Stack stack;
  stack.reserve(6);
  stack.emplace_back(x);
  stack.emplace_back(weight);
  stack.emplace_back(bias);
  stack.emplace_back("none");
  stack.emplace_back(c10::List<std::optional<at::Scalar>>());
  stack.emplace_back();  // no algorithm of its own
  op.callBoxed(stack);
  return std::move(stack.front()).toTensor();
}

std::optional<at::Tensor> optional_of(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

}  // namespace

bool multiplies_in_fp32(const at::Tensor& operand) {
  return operand.device().is_cpu() && operand.scalar_type() == at::kBFloat16 &&
         !has_bf16_hardware();
}

at::Tensor affine(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  if (multiplies_by_onednn(x, x.numel() / std::max<std::int64_t>(1, x.size(-1)), weight.size(0))) {
    return affine_by_onednn(x, weight, optional_of(bias));
  }
  if (!multiplies_in_fp32(x)) {
    return at::linear(x, weight, optional_of(bias));
  }
  const auto wide_bias = bias.defined() ? bias.to(at::kFloat) : bias;
  return at::linear(x.to(at::kFloat), weight.to(at::kFloat), optional_of(wide_bias))
      .to(x.scalar_type());
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  if (multiplies_by_onednn(a, a.size(0), b.size(1)) && a.is_contiguous() && b.is_contiguous()) {
    return affine_by_onednn(a, b.t(), std::nullopt);
  }
  if (!multiplies_in_fp32(a)) {
    return at::mm(a, b);
  }
  return at::mm(a.to(at::kFloat), b.to(at::kFloat)).to(a.scalar_type());
}

at::Tensor transposed_product(const at::Tensor& a, const at::Tensor& b) {
  if (at::GradMode::is_enabled()) {
    return product(a.t(), b);
  }
  at::Tensor result = at::empty({a.size(1), b.size(1)}, a.options().requires_grad(false));
  transposed_product_into(result, a, b, /*overwrite=*/true);
  return result;
}

void transposed_product_into(
    const at::Tensor& destination, const at::Tensor& a, const at::Tensor& b, bool overwrite
) {
  at::Tensor out = destination;
  if (multiplies_in_fp32(a) && out.scalar_type() == at::kFloat) {
    return transposed_product_into(out, a.to(at::kFloat), b.to(at::kFloat), overwrite);
  }
  if (out.scalar_type() == a.scalar_type() && !multiplies_in_fp32(a)) {
    if (multiplies_here(out, a, b)) {
      multiply_here(out, a, b, overwrite);
    } else if (overwrite) {
      at::mm_out(out, a.t(), b);
    } else {
      at::addmm_out(out, out, a.t(), b);
    }
    return;
  }
  // No operator multiplies bf16 into an fp32 destination: one temporary, cast or added on the way
  // in.
  const auto result = product(a.t(), b);
  if (overwrite) {
    out.copy_(result);
  } else {
    out.add_(result);
  }
}

}  // namespace hypershard::nn::internal
