// Plays all ranks of a mesh in one process: cuts tensors by layout, and puts pieces together again.
// Written apart from the layout arithmetic that it helps to check.
#pragma once

#include <random>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/layout/mesh.h"
#include "hypershard/layout/tensor_spec.h"

namespace hypershard::dtensor::property {

using Random = std::mt19937_64;

/// Uniform in [0, bound).
std::int64_t draw(Random& random, std::int64_t bound);
bool chance(Random& random, double probability);

/// Returns what each rank holds. Terms of Partial tensors are random and reduce to the value.
std::vector<at::Tensor> cut(
    const at::Tensor& whole,
    const layout::TensorSpec& spec,
    const layout::DeviceMesh& mesh,
    Random& random
);

/// Undoes `cut`. Writes to `fault` if replicas differ or pieces do not fit.
at::Tensor join(
    const std::vector<at::Tensor>& locals,
    const layout::TensorSpec& spec,
    const layout::DeviceMesh& mesh,
    std::string& fault
);

/// Tells whether tensors agree in shape, dtype and values, NaN equal to NaN.
bool agree(const at::Tensor& a, const at::Tensor& b);

}  // namespace hypershard::dtensor::property
