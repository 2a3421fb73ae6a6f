// Cross entropy where each rank has the logits of some classes: the operator
// hypershard::cross_entropy_part_forward. Its backward needs no other rank and is that of the
// whole.
#pragma once

#include <cstdint>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/nn/row_part.h"

namespace hypershard::nn::internal {

/// Returns the mean loss and each row's log-sum-exp over all classes.
///
/// Shapes: logits [rows, part.count], targets [rows] of all classes; results [] and [rows], in the
/// compute dtype, the same bits on all ranks of the part. Collective: one all-gather of two numbers
/// a row; nothing is exchanged if the part has no ranks. Errors: InvalidArgument for a target
/// beyond the classes; CommError.
std::tuple<at::Tensor, at::Tensor> cross_entropy_part_forward(
    const at::Tensor& logits, const at::Tensor& targets, const RowPartPtr& part
);

/// The forward's check, with the number of classes that there are over all ranks.
void check_targets(const at::Tensor& targets, std::int64_t classes);

/// Returns the mean of the losses of the rows with a target, NaN if there are none.
at::Tensor mean_of_kept(
    const std::vector<double>& row_losses, const at::Tensor& targets, const at::TensorOptions& as
);

}  // namespace hypershard::nn::internal
