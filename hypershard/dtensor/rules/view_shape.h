// Where the dimensions of a view come from, when the view's sizes are one rank's own.
#pragma once

#include <cstdint>
#include <vector>

#include "hypershard/dtensor/rule_call.h"

namespace hypershard::dtensor::rules {

/// Maps operand 0 onto a view of local shape `sizes` (one entry may be -1).
///
/// A cut dimension must be the outermost one of those that are merged or split with it; it stays
/// cut as the outermost dimension of the result. Global sizes follow from the operand's, so that
/// ranks with different, or empty, pieces come to the same shape.
DimMap view_map(const RuleCall& call, std::vector<std::int64_t> sizes);

}  // namespace hypershard::dtensor::rules
