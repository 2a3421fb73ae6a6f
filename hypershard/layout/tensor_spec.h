// A tensor as the whole mesh sees it: global shape and layout, no values, no dtype.
// What rules, plans and validation carry along instead of tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "hypershard/layout/placement.h"

namespace hypershard::layout {

/// Global shape of a tensor and how it lies on a mesh.
struct TensorSpec {
  std::vector<std::int64_t> shape;  ///< global, logical; {} is a scalar
  Layout layout;
  bool operator==(const TensorSpec&) const = default;
};

}  // namespace hypershard::layout
