// Plans in run configurations: the tables below `[plan]`.
#pragma once

#include "hypershard/core/config.h"
#include "hypershard/plan/sharding_plan.h"

namespace hypershard::plan {

/// The tables of a plan as a file states them.
///
/// ```
/// [plan.parameters]
/// "blocks.*.mlp.up.*"         = { tp = "shard(0)" }
/// "blocks.*.mlp.down.weight"  = { tp = "shard(1)" }
/// [plan.inputs]
/// "blocks.*.mlp"   = { tp = "replicate" }    # tensor 0 of its arguments
/// "blocks.*.attn#1" = { tp = "shard(2)" }    # tensor 1
/// [plan.outputs]
/// "blocks.*.mlp"   = { tp = "replicate" }
/// ```
struct PlanConfig {
  PatternTable<WordTable> parameters = {};
  PatternTable<WordTable> inputs = {};
  PatternTable<WordTable> outputs = {};
};

/// Binds the keys of section `plan` to `config` and adds a check of every rule to the schema, so
/// that a wrong placement is reported with the place it was given at. `config` must outlive the
/// schema.
void bind_plan(Schema& schema, PlanConfig* config);

/// Makes the plan. Errors: InvalidArgument naming the rule.
ShardingPlan make_plan(const PlanConfig& config);

}  // namespace hypershard::plan
