// The gated activation of LLaMA's feed-forward layer in one pass.
// silu and mul of ATen keep a third tensor for backward and walk memory five times.
#pragma once

#include <ATen/core/Tensor.h>

namespace hypershard::nn {

/// Returns silu(gate) * up, elementwise; computed in fp32 (fp64 for fp64).
///
/// Shapes: gate and up equal, of one dtype; result as they.
/// Memory: keeps gate and up for backward, nothing else.
/// Errors: InvalidArgument if shapes or dtypes differ.
/// Source: Shazeer 2020, arXiv 2002.05202, eq. 6.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

}  // namespace hypershard::nn
