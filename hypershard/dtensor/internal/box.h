// Boxes of a tensor's global index space: who holds what, and copies between local tensors in those
// terms. A box is one range a dimension.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/layout/packing.h"

namespace hypershard::dtensor::internal {

using Box = std::vector<layout::Range>;

std::vector<std::int64_t> shape_of(const Box& box);
std::int64_t numel_of(const Box& box);
Box intersect(const Box& a, const Box& b);

/// Returns the view of `part` in `local`, which holds `whole`. Precondition: `part` lies in
/// `whole`.
at::Tensor view_of(const at::Tensor& local, const Box& whole, const Box& part);

/// Returns whether `parts`, one after another, are the elements of `whole` in memory order. If so,
/// a collective can read or write them where they are. Empty parts fit anywhere.
bool are_consecutive_runs(const std::vector<Box>& parts, const Box& whole);

}  // namespace hypershard::dtensor::internal
