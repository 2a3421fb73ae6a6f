// Fused CPU kernels of the layers, on raw memory: one pass where ATen's operators would make five.
// They know no tensors and no threads; callers split rows over threads and check shapes.
#pragma once

#include <cstdint>

#include "hypershard/nn/internal/element.h"

namespace hypershard::nn::internal {

/// y = x / sqrt(mean(x^2) + eps) * weight for each row; keeps 1 / sqrt(...) in `rstd` for the
/// backward pass.
///
/// Source: Zhang and Sennrich 2019, arXiv 1910.07467, eq. 4.
template <class T>
struct RmsNormForward {
  const T* x;        // [rows, dim]
  const T* weight;   // [dim]
  T* y;              // [rows, dim]
  Compute<T>* rstd;  // [rows]
  double eps;
};

template <class T>
struct RmsNormBackward {
  const T* grad_y;          // [rows, dim]
  const T* x;               // [rows, dim]
  const T* weight;          // [dim]
  const Compute<T>* rstd;   // [rows]
  T* grad_x;                // [rows, dim]
  Compute<T>* grad_weight;  // [dim], added to
};

/// h = silu(gate) * up, elementwise.
///
/// Source: Shazeer 2020, arXiv 2002.05202, eq. 6.
template <class T>
struct SwigluForward {
  const T* gate;
  const T* up;
  T* h;
};

template <class T>
struct SwigluBackward {
  const T* grad_h;
  const T* gate;
  const T* up;
  T* grad_gate;
  T* grad_up;
};

/// Rotates the pairs (x[i], x[i + half]) of every head by the angle of its position: (a cos - b
/// sin, a sin + b cos).
///
/// Source: Su et al. 2021, arXiv 2104.09864, in the split-half order.
template <class T>
struct Rotate {
  const T* x;                // [positions, heads, 2 half], with the strides below
  T* y;                      // [positions, heads, 2 half], contiguous
  const Compute<T>* cosine;  // [positions, half]
  const Compute<T>* sine;    // [positions, half]
  std::int64_t x_position_stride;
  std::int64_t x_head_stride;
  std::int64_t heads;
  std::int64_t half;
  bool backwards;  // rotate by minus the angle
};

/// Cross entropy of rows of logits; a negative target leaves its row out.
template <class T>
struct CrossEntropyForward {
  const T* logits;              // [rows, classes]
  const std::int64_t* targets;  // [rows]
  Compute<T>* log_sum_exp;      // [rows]
  double* loss;                 // [rows], 0 where left out
  std::int64_t classes;
};

/// What a rank with a part of the classes contributes.
template <class T>
struct CrossEntropyPart {
  const T* logits;              // [rows, classes]
  const std::int64_t* targets;  // [rows], of all classes
  Compute<T>* log_sum_exp;      // [rows], over these classes; 0 where left out
  Compute<T>* at_target;        // [rows], 0 where the target is none of these classes
  std::int64_t classes;
  std::int64_t first_class;
};

template <class T>
struct CrossEntropyBackward {
  const T* logits;                // [rows, classes]
  const std::int64_t* targets;    // [rows], of all classes
  const Compute<T>* log_sum_exp;  // [rows], over all classes
  T* grad_logits;                 // [rows, classes]
  std::int64_t classes;
  std::int64_t first_class;  // number of the first of these classes
  double scale;
};

#define HS_DECLARE_KERNELS(T)                                                                    \
  void run_rms_norm_forward(                                                                     \
      const RmsNormForward<T>& args, std::int64_t begin, std::int64_t end, std::int64_t dim      \
  );                                                                                             \
  void run_rms_norm_backward(                                                                    \
      const RmsNormBackward<T>& args, std::int64_t begin, std::int64_t end, std::int64_t dim     \
  );                                                                                             \
  void run_swiglu_forward(const SwigluForward<T>& args, std::int64_t begin, std::int64_t end);   \
  void run_swiglu_backward(const SwigluBackward<T>& args, std::int64_t begin, std::int64_t end); \
  void run_rotate(const Rotate<T>& args, std::int64_t begin, std::int64_t end);                  \
  void run_cross_entropy_forward(                                                                \
      const CrossEntropyForward<T>& args, std::int64_t begin, std::int64_t end                   \
  );                                                                                             \
  void run_cross_entropy_part(                                                                   \
      const CrossEntropyPart<T>& args, std::int64_t begin, std::int64_t end                      \
  );                                                                                             \
  void run_cross_entropy_backward(                                                               \
      const CrossEntropyBackward<T>& args, std::int64_t begin, std::int64_t end                  \
  );                                                                                             \
  void add_to(float* to, const T* from, std::int64_t n);                                         \
  void add_to(double* to, const T* from, std::int64_t n);                                        \
  void add_to(Bf16* to, const T* from, std::int64_t n);

HS_DECLARE_KERNELS(float)
HS_DECLARE_KERNELS(double)
HS_DECLARE_KERNELS(Bf16)
#undef HS_DECLARE_KERNELS

}  // namespace hypershard::nn::internal
