// Causal attention of whole heads on raw memory, forward and backward.
// libtorch's CPU flash kernel computes the masked half of short sequences too; for training at 64
// to 2048 positions this one takes about half its time.
#pragma once

#include <cstdint>

#include "hypershard/nn/internal/element.h"

namespace hypershard::nn::internal {

/// One operand [batch, positions, heads, head_dim]; the last dimension is contiguous.
template <class T>
struct HeadsView {
  T* data;
  std::int64_t batch_stride;
  std::int64_t position_stride;
  std::int64_t head_stride;

  T* head(std::int64_t batch, std::int64_t index) const {
    return data + batch * batch_stride + index * head_stride;
  }
};

struct AttentionShape {
  std::int64_t positions;
  std::int64_t heads;
  std::int64_t
      kv_heads;  // heads is a multiple of it; query head h reads key head h / (heads / kv_heads)
  std::int64_t head_dim;  // a multiple of kLanes
  double scale;
};

template <class T>
struct AttentionForward {
  AttentionShape shape;
  HeadsView<const T> q, k, v;
  HeadsView<T> out;
  Compute<T>* log_sum_exp;  // [batch, heads, positions]
};

template <class T>
struct AttentionBackward {
  AttentionShape shape;
  HeadsView<const T> q, k, v, out, grad_out;
  HeadsView<T> grad_q, grad_k, grad_v;
  const Compute<T>* log_sum_exp;  // [batch, heads, positions]
};

/// Tells whether the kernels take these sizes.
bool attention_kernel_fits(const AttentionShape& shape, bool is_double);

/// Process the key heads [begin, end) of all batch * kv_heads, with all query heads that read them.
///
/// Source: Dao et al. 2022, arXiv 2205.14135, section 3.1 and appendix B for the backward pass; a
/// row of scores is kept whole
///         here, so its softmax needs no second look.
#define HS_DECLARE_KERNELS(T)                                                \
  void run_attention_forward(                                                \
      const AttentionForward<T>& args, std::int64_t begin, std::int64_t end  \
  );                                                                         \
  void run_attention_backward(                                               \
      const AttentionBackward<T>& args, std::int64_t begin, std::int64_t end \
  );

HS_DECLARE_KERNELS(float)
HS_DECLARE_KERNELS(double)
HS_DECLARE_KERNELS(Bf16)
#undef HS_DECLARE_KERNELS

}  // namespace hypershard::nn::internal
