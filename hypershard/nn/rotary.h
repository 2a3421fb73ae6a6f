// Rotary position embedding in one pass, without the cat that two rotated halves would need.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace hypershard::nn {

/// Cosines and sines of the angles position * theta^(-2 i / head_dim), i < head_dim / 2.
struct RotaryTable {
  at::Tensor cosine;  ///< [positions, head_dim / 2], fp32 or fp64
  at::Tensor sine;    ///< likewise

  /// Returns the rows of positions [begin, begin + count).
  RotaryTable narrow(std::int64_t begin, std::int64_t count) const;
};

/// Makes the table for positions 0 ... positions-1: angles in fp64, rounded to fp32 unless `dtype`
/// is fp64.
///
/// Errors: InvalidArgument if head_dim is odd or not positive.
RotaryTable make_rotary_table(
    std::int64_t positions,
    std::int64_t head_dim,
    double theta,
    at::ScalarType dtype,
    at::Device device
);

/// Rotates every head of every position: (a, b) -> (a cos - b sin, a sin + b cos) on the halves a,
/// b of the head.
///
/// Shapes: x [batch, positions, heads, head_dim], last dimension contiguous, any other strides; the
/// table has a row for each
///         position; result contiguous, of x's shape and dtype.
/// Errors: InvalidArgument if the shapes do not fit.
/// Source: Su et al. 2021, arXiv 2104.09864; the pairing (i, i + head_dim / 2) of GPT-NeoX and
/// LLaMA.
at::Tensor rotate(const at::Tensor& x, const RotaryTable& table);

}  // namespace hypershard::nn
