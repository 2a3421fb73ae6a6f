// Why: the schema is long; the sections that say how a model is spread have a file of their own.
#pragma once

#include "hypershard/core/config.h"
#include "hypershard/train/run_config.h"

namespace hypershard::train::internal {

/// Binds the keys of section `parallel`. `parallel` must outlive the schema.
void bind_parallel(Schema& schema, ParallelSection& parallel);
/// Binds the keys of section `precision`. `precision` must outlive the schema.
void bind_precision(Schema& schema, PrecisionSection& precision);

}  // namespace hypershard::train::internal
