// Where the dimensions of a view come from, when the view's sizes are one rank's own.
#pragma once

#include <cstdint>
#include <vector>

#include "hypershard/dtensor/rule_call.h"

namespace hypershard::dtensor::rules {

/// One run of dimensions that hold the same entries: [in_begin, in_end) became [out_begin,
/// out_end).
struct Run {
  int in_begin = 0;
  int in_end = 0;
  int out_begin = 0;
  int out_end = 0;
};

/// Maps operand 0 onto a view of local shape `sizes` (one entry may be -1).
///
/// A cut dimension must be the outermost one of those that are merged or split with it; it stays
/// cut as the outermost dimension of the result. Global sizes follow from the operand's, so that
/// ranks with different, or empty, pieces come to the same shape.
///
/// Sizes do not always tell. `[b, x]`, cut along x, viewed as `[b, 1, x]`, is taken for one entry a
/// rank with x inside (one attention head a rank), not for a new dimension; -1 tells which is
/// meant. Pieces of 1 are matched with the first 1 that fits. Operators that name dimensions leave
/// no such choice; they state `runs`.
DimMap view_map(const RuleCall& call, std::vector<std::int64_t> sizes, std::vector<Run> runs = {});

}  // namespace hypershard::dtensor::rules
