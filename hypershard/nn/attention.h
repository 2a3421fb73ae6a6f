// Causal self-attention over whole sequences, fused for training on CPU.
// Where the fused kernel does not fit it is at::scaled_dot_product_attention.
#pragma once

#include <ATen/core/Tensor.h>

namespace hypershard::nn {

/// Returns softmax(q k^T / sqrt(head_dim) + causal mask) v for every head.
///
/// Query head h reads key head h / (heads / kv_heads) (grouped-query attention). The CPU kernel
/// takes float, double and bfloat16 (computed in fp32), up to 4096 positions and a head_dim that is
/// a multiple of 8; anything else goes to at::scaled_dot_product_attention, which is slower here:
/// it computes the masked half of short sequences too. Shapes: q [batch, positions, heads,
/// head_dim]; k, v [batch, positions, kv_heads, head_dim]; result as q, contiguous. Memory: keeps
/// q, k, v, the result and one number a row for backward; workspace of a few heads. Errors:
/// InvalidArgument if the shapes do not fit. Source: Vaswani et al. 2017, arXiv 1706.03762, eq. 1;
/// backward as in Dao et al. 2022, arXiv 2205.14135.
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

}  // namespace hypershard::nn
