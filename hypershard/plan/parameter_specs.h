// What fully_shard must know of a plan: which parameters are parts of larger ones, and whose
// gradients are still to be summed over the plan's axes.
#pragma once

#include <map>
#include <string>

#include "hypershard/plan/resolved_plan.h"
#include "hypershard/shard/options.h"

namespace hypershard::plan {

/// Makes FullyShardOptions::parameters from a resolved plan, for a plan that was applied with
/// ApplyOptions::reduce_gradients = false.
///
/// ```
/// auto applied = plan::apply_plan(*model, resolved, mesh, {.reduce_gradients = false});
/// options.parameters = plan::parameter_specs(applied.resolved());
/// auto sharded = shard::fully_shard(*model, *mesh, options);
/// ```
/// Buffers are left out: fully_shard leaves them to the module. The plan should have been resolved
/// with ResolveOptions::data_axes naming the mesh's data axes.
std::map<std::string, shard::ParameterSpec> parameter_specs(const ResolvedPlan& plan);

}  // namespace hypershard::plan
