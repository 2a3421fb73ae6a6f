// Matrix products in the precision that this machine multiplies fast, into destinations of the
// caller's.
#include "hypershard/nn/internal/matmul.h"

#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

namespace hypershard::nn::internal {
namespace {

bool has_bf16_hardware() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16") != 0;
#else
  return true;
#endif
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
  if (!multiplies_in_fp32(x)) {
    return at::linear(x, weight, optional_of(bias));
  }
  const auto wide_bias = bias.defined() ? bias.to(at::kFloat) : bias;
  return at::linear(x.to(at::kFloat), weight.to(at::kFloat), optional_of(wide_bias))
      .to(x.scalar_type());
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  if (!multiplies_in_fp32(a)) {
    return at::mm(a, b);
  }
  return at::mm(a.to(at::kFloat), b.to(at::kFloat)).to(a.scalar_type());
}

void transposed_product_into(
    const at::Tensor& destination, const at::Tensor& a, const at::Tensor& b, bool overwrite
) {
  at::Tensor out = destination;
  if (multiplies_in_fp32(a) && out.scalar_type() == at::kFloat) {
    return transposed_product_into(out, a.to(at::kFloat), b.to(at::kFloat), overwrite);
  }
  if (out.scalar_type() == a.scalar_type() && !multiplies_in_fp32(a)) {
    if (overwrite) {
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
