// Remembers which parameters are parts: to a plan that is resolved later their shapes would be
// those of whole ones.
#pragma once

#include <ATen/core/Tensor.h>

namespace hypershard::plan::internal {

/// Notes that a plan gave this parameter its part. Forgotten with the tensor. Threads: any.
void note_cut(const at::Tensor& parameter);

/// Tells whether a plan cut the parameter, and nobody gave it other sizes since. Threads: any.
bool is_part(const at::Tensor& parameter);

}  // namespace hypershard::plan::internal
