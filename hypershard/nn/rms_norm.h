// Root-mean-square normalisation in one fused pass, and its layer.
// ATen's rms_norm is composed of six operators on CPU, each with its own pass and graph node.
#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <torch/nn/pimpl.h>

#include "hypershard/nn/hooks.h"

namespace hypershard::nn {

/// Returns x / sqrt(mean(x^2) + eps) * weight over the last dimension; statistics in fp32 (fp64 for
/// fp64).
///
/// Writes the weight's gradient into its GradientSlot if it has one.
/// Shapes: x [..., dim]; weight [dim]; result as x, in x's dtype.
/// Errors: InvalidArgument if the shapes do not fit.
/// Source: Zhang and Sennrich 2019, arXiv 1910.07467, eq. 4.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

/// Size and place of an RmsNorm.
struct RmsNormOptions {
  std::int64_t dim = 0;
  double eps = 1e-5;
  std::optional<at::Device> device = std::nullopt;
  std::optional<at::ScalarType> dtype = std::nullopt;
};

/// Layer with parameter `weight` [dim], which starts as ones.
class RmsNormImpl : public Hookable<RmsNormImpl, at::Tensor(const at::Tensor&)> {
 public:
  explicit RmsNormImpl(const RmsNormOptions& options);
  explicit RmsNormImpl(std::int64_t dim) : RmsNormImpl(RmsNormOptions{.dim = dim}) {}

  void reset() override;
  at::Tensor forward_impl(const at::Tensor& x) { return nn::rms_norm(x, weight, options.eps); }

  RmsNormOptions options;
  at::Tensor weight;
};
TORCH_MODULE(RmsNorm);

}  // namespace hypershard::nn
