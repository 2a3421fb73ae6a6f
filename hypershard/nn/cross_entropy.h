// Mean cross entropy straight from logits: no table of log probabilities, and fp32 arithmetic for
// bf16 logits without a copy.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "hypershard/nn/row_part.h"

namespace hypershard::nn {

/// Returns the mean over rows of -log softmax(logits)[target], a scalar in fp32 (fp64 for fp64).
///
/// A negative target (torch's ignore_index is -100) leaves its row out; with no row left the mean
/// is NaN. Shapes: logits [..., classes]; targets [...], int64. Memory: keeps logits and one number
/// a row for backward. Errors: InvalidArgument if the shapes do not fit or a target is not below
/// `classes` (names its row).
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets);

/// The same for logits of a projection whose rows may be cut over ranks (null: they are not): the
/// ranks exchange two numbers a row and never the logits.
///
/// Shapes: logits [..., part.count] of this rank's classes, or [..., part.total]; targets [...] of
/// all classes, alike on all ranks of the part; the result has the same bits on all of them.
/// Collective: the part's ranks, in forward only. Errors: as above; Unsupported under create_graph
/// for logits that are a part.
at::Tensor cross_entropy(
    const at::Tensor& logits, const at::Tensor& targets, const RowPartPtr& rows_of_head
);

/// Returns how many numbers one call of it gathers in one collective of its own on each rank, in
/// the dtype of its result, for so many rows over so many ranks.
constexpr std::int64_t cross_entropy_gathered_numel(std::int64_t rows, std::int64_t num_ranks) {
  return 2 * rows * num_ranks;
}

}  // namespace hypershard::nn
