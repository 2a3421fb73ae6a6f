// Mean cross entropy straight from logits: no table of log probabilities, and fp32 arithmetic for
// bf16 logits without a copy.
#pragma once

#include <ATen/core/Tensor.h>

namespace hypershard::nn {

/// Returns the mean over rows of -log softmax(logits)[target], a scalar in fp32 (fp64 for fp64).
///
/// A negative target (torch's ignore_index is -100) leaves its row out; with no row left the mean
/// is NaN. Shapes: logits [..., classes]; targets [...], int64. Memory: keeps logits and one number
/// a row for backward. Errors: InvalidArgument if the shapes do not fit or a target is not below
/// `classes` (names its row).
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets);

}  // namespace hypershard::nn
