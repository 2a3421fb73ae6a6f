// Register-tiled products of matrices that lie in cache, for fused kernels that must not leave it.
// Kernel files only. Four rows by up to three packs are accumulated in registers; the left operand
// is read element by element with any strides, so that a transposed one costs nothing.
#pragma once

#include <cstdint>

#include "hypershard/nn/internal/simd.h"

namespace hypershard::nn::internal {

/// The left operand: element (i, k) at data[i * row_stride + k * depth_stride].
template <class A>
struct LeftOperand {
  const A* data;
  std::int64_t row_stride;
  std::int64_t depth_stride;
};

/// c (+)= left right for one tile of kRows x kPacks packs; right [depth, .] and c have unit column
/// stride.
template <bool kAdd, int kRows, int kPacks, class A>
HS_INLINE void multiply_tile(
    const LeftOperand<A>& left,
    const A* right,
    std::int64_t right_stride,
    A* c,
    std::int64_t c_stride,
    std::int64_t depth
) {
  using P = PackOf<A>;
  P sums[kRows][kPacks];
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kPacks; ++j) {
      sums[i][j] = kAdd ? load<P>(c + i * c_stride + j * kLanes<A>) : P{};
    }
  }
  for (std::int64_t k = 0; k < depth; ++k) {
    P row[kPacks];
    for (int j = 0; j < kPacks; ++j) {
      row[j] = load<P>(right + k * right_stride + j * kLanes<A>);
    }
    for (int i = 0; i < kRows; ++i) {
      const A factor = left.data[i * left.row_stride + k * left.depth_stride];
      for (int j = 0; j < kPacks; ++j) {
        sums[i][j] += row[j] * factor;
      }
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kPacks; ++j) {
      store(c + i * c_stride + j * kLanes<A>, sums[i][j]);
    }
  }
}

template <bool kAdd, int kPacks, class A>
HS_INLINE void multiply_columns(
    LeftOperand<A> left,
    const A* right,
    std::int64_t right_stride,
    A* c,
    std::int64_t c_stride,
    std::int64_t rows,
    std::int64_t depth
) {
  for (; rows >= 4; rows -= 4) {
    multiply_tile<kAdd, 4, kPacks>(left, right, right_stride, c, c_stride, depth);
    left.data += 4 * left.row_stride;
    c += 4 * c_stride;
  }
  for (; rows > 0; --rows) {
    multiply_tile<kAdd, 1, kPacks>(left, right, right_stride, c, c_stride, depth);
    left.data += left.row_stride;
    c += c_stride;
  }
}

/// c (+)= left right; `columns` is a multiple of the lanes.
template <bool kAdd, class A>
HS_INLINE void multiply(
    const LeftOperand<A>& left,
    const A* right,
    std::int64_t right_stride,
    A* c,
    std::int64_t c_stride,
    std::int64_t rows,
    std::int64_t columns,
    std::int64_t depth
) {
  std::int64_t packs = columns / kLanes<A>;
  std::int64_t at = 0;
  while (packs > 0) {
    // 4 packs go as 2 + 2: a tile of one pack leaves the multipliers waiting for its few sums.
    if (packs == 3 || packs > 4) {
      multiply_columns<kAdd, 3>(left, right + at, right_stride, c + at, c_stride, rows, depth);
      at += 3 * kLanes<A>;
      packs -= 3;
    } else if (packs >= 2) {
      multiply_columns<kAdd, 2>(left, right + at, right_stride, c + at, c_stride, rows, depth);
      at += 2 * kLanes<A>;
      packs -= 2;
    } else {
      multiply_columns<kAdd, 1>(left, right + at, right_stride, c + at, c_stride, rows, depth);
      at += kLanes<A>;
      packs -= 1;
    }
  }
}

}  // namespace hypershard::nn::internal
