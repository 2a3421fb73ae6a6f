// Why: how a run's model lies on its mesh follows from the configuration alone; the trainer, the
// report before a run and validation must not differ about it.
#pragma once

#include <memory>

#include "hypershard/comm/world.h"
#include "hypershard/model/gpt_config.h"
#include "hypershard/plan/apply.h"
#include "hypershard/plan/resolve.h"
#include "hypershard/plan/sharding_plan.h"
#include "hypershard/train/run_config.h"

namespace torch::nn {
class Module;
}

namespace hypershard::train {

/// Returns the plan of a configuration: ready-made ones, then the rules of section `plan`. Empty if
/// the mesh has no axis for it.
/// Errors: InvalidArgument as model::gpt_plan and plan::make_plan.
plan::ShardingPlan make_sharding_plan(
    const RunConfig& config, const model::GptConfig& shape, const layout::DeviceMesh& mesh
);

/// Resolves that plan for one rank on a model without memory: rows cut over the data axes, whose
/// gradients are left to the data-parallel engine. Collective: no.
/// Errors: as make_sharding_plan and plan::resolve.
plan::ResolvedPlan resolve_layout(
    const RunConfig& config, const model::GptConfig& shape, const layout::DeviceMesh& mesh, int rank
);

/// Resolves and installs it on `model`, whose parameters have no values yet; reductions of
/// gradients are left to the engine. Collective: all ranks of the mesh. Errors: as resolve_layout
/// and plan::apply_plan.
plan::AppliedPlan apply_layout(
    const RunConfig& config,
    const model::GptConfig& shape,
    torch::nn::Module& model,
    std::shared_ptr<const comm::ProcessMesh> mesh
);

}  // namespace hypershard::train
