// Random layouts of an operator's operands.
#pragma once

#include <vector>

#include "hypershard/dtensor/internal/property/rule_case.h"
#include "hypershard/layout/mesh.h"
#include "hypershard/layout/tensor_spec.h"

namespace hypershard::dtensor::property {

/// Chooses layouts. Blind choice is nearly always refused by operators with many operands, so cuts
/// mostly go through dimensions of one size, and Partial mostly through one or all operands.
std::vector<layout::TensorSpec> draw_layouts(
    const Tensors& tensors, const layout::DeviceMesh& mesh, Random& random
);

}  // namespace hypershard::dtensor::property
