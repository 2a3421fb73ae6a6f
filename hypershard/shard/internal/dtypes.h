// Why: what a user says of precision has holes; they are filled in one place.
#pragma once

#include "hypershard/shard/group.h"
#include "hypershard/shard/options.h"

namespace hypershard::shard::internal {

/// Throws InvalidArgument if a setting is no floating dtype that the engine supports.
void check_precision(const MixedPrecision& precision);

/// Settles the dtypes of a parameter. Errors: InvalidArgument if one that is not floating requires
/// a gradient.
GroupDtypes settle_dtypes(const MixedPrecision& precision, const LogicalParam& param);

}  // namespace hypershard::shard::internal
