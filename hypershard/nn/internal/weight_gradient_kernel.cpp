// See weight_gradient_kernel.h. A tile of four rows by three packs stays in registers over the
// whole depth.
#include "hypershard/nn/internal/weight_gradient_kernel.h"

#include <algorithm>
#include <cstdint>

#include "hypershard/nn/internal/simd.h"
#include "hypershard/nn/internal/small_matmul.h"

namespace hypershard::nn::internal {
namespace {

constexpr int kTileRows = 4;
constexpr int kTilePacks = 3;
constexpr std::int64_t kStrip = kTilePacks * kLanes<float>;
/// Left panels that are packed at once; they stay in the second-level cache.
constexpr std::int64_t kLeftNumel = 1 << 17;

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::int64_t rows_at_once(std::int64_t depth, std::int64_t rows) {
  const std::int64_t fitting = std::max<std::int64_t>(1, kLeftNumel / (depth * kTileRows));
  return std::min(fitting * kTileRows, round_up(rows, kTileRows));
}

/// Copies columns [begin, end) of a [depth, columns] matrix to [depth, width], zeros behind them.
HS_INLINE void pack_columns(
    const float* from,
    float* to,
    std::int64_t depth,
    std::int64_t columns,
    std::int64_t begin,
    std::int64_t end,
    std::int64_t width
) {
  const std::int64_t n = end - begin;
  for (std::int64_t k = 0; k < depth; ++k) {
    const float* row = from + k * columns + begin;
    float* packed = to + k * width;
    for (std::int64_t i = 0; i < n; ++i) {
      packed[i] = row[i];
    }
    for (std::int64_t i = n; i < width; ++i) {
      packed[i] = 0;
    }
  }
}

/// One tile: `left` [depth, 4], `right` [depth, 24], into the first `rows` x `columns` at c.
HS_INLINE void multiply_panel(
    const float* left,
    const float* right,
    float* c,
    std::int64_t stride,
    std::int64_t depth,
    std::int64_t rows,
    std::int64_t columns,
    bool overwrite
) {
  const LeftOperand<float> operand{left, /*row_stride=*/1, /*depth_stride=*/kTileRows};
  if (overwrite && rows == kTileRows && columns == kStrip) {
    multiply_tile<false, kTileRows, kTilePacks>(operand, right, kStrip, c, stride, depth);
    return;
  }
  float tile[kTileRows * kStrip];
  multiply_tile<false, kTileRows, kTilePacks>(operand, right, kStrip, tile, kStrip, depth);
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) {
      float& to = c[i * stride + j];
      to = overwrite ? tile[i * kStrip + j] : to + tile[i * kStrip + j];
    }
  }
}

}  // namespace

std::int64_t panel_numel(std::int64_t depth, std::int64_t rows, std::int64_t columns) {
  return depth * (rows_at_once(depth, rows) + round_up(columns, kStrip));
}

HS_KERNEL void multiply_transposed(
    const float* a,
    const float* b,
    float* c,
    std::int64_t depth,
    std::int64_t rows,
    std::int64_t columns,
    bool overwrite,
    float* panels
) {
  float* right = panels;
  float* left = panels + depth * round_up(columns, kStrip);
  for (std::int64_t at = 0; at < columns; at += kStrip) {
    pack_columns(b, right + depth * at, depth, columns, at, std::min(at + kStrip, columns), kStrip);
  }
  const std::int64_t block = rows_at_once(depth, rows);
  for (std::int64_t first = 0; first < rows; first += block) {
    const std::int64_t last = std::min(first + block, rows);
    for (std::int64_t row = first; row < last; row += kTileRows) {
      pack_columns(
          a,
          left + depth * (row - first),
          depth,
          rows,
          row,
          std::min(row + kTileRows, rows),
          kTileRows
      );
    }
    for (std::int64_t at = 0; at < columns; at += kStrip) {
      for (std::int64_t row = first; row < last; row += kTileRows) {
        multiply_panel(
            left + depth * (row - first),
            right + depth * at,
            c + row * columns + at,
            columns,
            depth,
            std::min<std::int64_t>(kTileRows, rows - row),
            std::min(kStrip, columns - at),
            overwrite
        );
      }
    }
  }
}

}  // namespace hypershard::nn::internal
