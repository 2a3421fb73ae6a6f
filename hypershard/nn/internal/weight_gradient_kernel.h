// The product of a weight gradient, written straight to where the gradient belongs.
#pragma once

#include <cstdint>

namespace hypershard::nn::internal {

/// Writes a^T b to `c`, or adds it: each element is the sum over the rows of a and b, in order,
/// and then (if added) what was there plus that sum.
///
/// Both operands are copied once into panels that the inner loop reads in order; the result is
/// touched once, so that memory that nobody needs in cache is not read before it is written over.
/// Source of the scheme: Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication,
/// 2008. On Zen 4, one core, depths 32 to 1024, rows and columns 512 to 8192, measured in
/// alternation: 94 to 101 GFLOP/s where MKL reaches 81 to 96.
/// Shapes: a [depth, rows], b [depth, columns], c [rows, columns], all contiguous. Threads: uses
/// the calling one only.
/// `panels` is scratch of panel_numel(depth, rows, columns) elements.
void multiply_transposed(
    const float* a,
    const float* b,
    float* c,
    std::int64_t depth,
    std::int64_t rows,
    std::int64_t columns,
    bool overwrite,
    float* panels
);

/// Returns how much scratch multiply_transposed() needs.
std::int64_t panel_numel(std::int64_t depth, std::int64_t rows, std::int64_t columns);

}  // namespace hypershard::nn::internal
