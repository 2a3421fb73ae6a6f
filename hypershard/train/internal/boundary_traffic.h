// Why: what a plan's boundaries communicate in a step, in the form of the engine's collectives.
#pragma once

#include "hypershard/train/run_config.h"
#include "hypershard/train/run_plan.h"

namespace hypershard::train::internal {

/// Fills `plan.crossings` from `plan.resolved`: every collective of every micro-batch, forward and
/// backward, and again where a block is recomputed; at the end what a loss over a cut vocabulary
/// exchanges.
void add_crossings(RunPlan& plan, const RunConfig& config);

}  // namespace hypershard::train::internal
