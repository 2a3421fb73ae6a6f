// Matrix products as the layers need them: into a given destination, and in the precision that this
// machine multiplies fast.
#pragma once

#include <ATen/core/Tensor.h>

namespace hypershard::nn::internal {

/// Tells whether products of this dtype on this device are better done in fp32: see NOTE [bf16
/// without bf16 hardware].
bool multiplies_in_fp32(const at::Tensor& operand);

/// Returns x weight^T + bias; x [..., in], weight [out, in], bias [out] or undefined.
at::Tensor affine(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

/// Returns a b for matrices.
at::Tensor product(const at::Tensor& a, const at::Tensor& b);

/// Returns a^T b for matrices of one dtype.
at::Tensor transposed_product(const at::Tensor& a, const at::Tensor& b);

/// Writes (or adds) a^T b into `destination` for matrices of one dtype, rounding to the
/// destination's dtype once.
void transposed_product_into(
    const at::Tensor& destination, const at::Tensor& a, const at::Tensor& b, bool overwrite
);

}  // namespace hypershard::nn::internal
