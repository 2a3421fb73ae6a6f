// The linear layer whose weight gradient goes straight into the engine's gradient buffer.
// torch::nn::Linear makes a temporary of the weight's size in every backward, which somebody must
// then copy or add.
#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <torch/nn/pimpl.h>

#include "hypershard/nn/hooks.h"

namespace hypershard::nn {

/// Returns x weight^T + bias.
///
/// Where weight or bias have a GradientSlot, backward writes (first use of an accumulation) or adds
/// (later ones) their gradients there, in the slot's dtype: no zero fill, no addition; for fp32 and
/// fp64 no temporary either.
///
/// NOTE [bf16 without bf16 hardware]: on a CPU without bf16 matrix instructions libtorch's bf16
/// products are 7 to 100 times slower than fp32 ones. There the operands are widened, the product
/// runs in fp32 and its result is rounded once; weight gradients for an fp32 slot are then not
/// rounded at all. Elsewhere products run in bf16. Shapes: x [..., in]; weight [out, in]; bias
/// [out] or undefined; result [..., out]. Errors: InvalidArgument if the shapes do not fit;
/// Unsupported under create_graph if a slot is attached.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

/// Size, place and start of a Linear.
struct LinearOptions {
  std::int64_t in = 0;
  std::int64_t out = 0;
  bool bias = false;
  std::optional<at::Device> device = std::nullopt;
  std::optional<at::ScalarType> dtype = std::nullopt;
  bool initialize = true;  ///< false: leave the memory as it is, somebody else fills it
};

/// Layer with parameters `weight` [out, in] and, if asked for, `bias` [out].
///
/// Both start uniform in +-1/sqrt(in), from torch's default generator (not at all on the meta
/// device).
class LinearImpl : public Hookable<LinearImpl, at::Tensor(const at::Tensor&)> {
 public:
  explicit LinearImpl(const LinearOptions& options);
  LinearImpl(std::int64_t in, std::int64_t out, bool with_bias = false)
      : LinearImpl(LinearOptions{.in = in, .out = out, .bias = with_bias}) {}

  void reset() override;
  at::Tensor forward_impl(const at::Tensor& x) { return nn::linear(x, weight, bias); }

  LinearOptions options;
  at::Tensor weight;
  at::Tensor bias;
};
TORCH_MODULE(Linear);

}  // namespace hypershard::nn
