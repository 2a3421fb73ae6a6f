// See boundary_traffic.h.
#include "hypershard/train/internal/boundary_traffic.h"

#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "hypershard/core/error.h"
#include "hypershard/layout/redistribution.h"
#include "hypershard/layout/sharding.h"

namespace hypershard::train::internal {
namespace {

using Kind = layout::RedistributionStep::Kind;

comm::Op op_of(Kind kind) {
  switch (kind) {
    case Kind::kAllGather:
      return comm::Op::kAllGather;
    case Kind::kReduceScatter:
      return comm::Op::kReduceScatter;
    case Kind::kAllReduce:
      return comm::Op::kAllReduce;
    case Kind::kAllToAll:
      return comm::Op::kAllToAll;
    default:
      HS_FAIL(InternalError, "train.run_plan: step ", to_text(kind), " is no collective");
  }
}

std::int64_t element_bytes(const std::string& dtype) {
  return dtype == "Double" || dtype == "Long" ? 8 : dtype == "Float" || dtype == "Int" ? 4 : 2;
}

std::int64_t local_numel(
    const std::vector<std::int64_t>& shape, const layout::Layout& layout, const RunPlan& plan
) {
  const auto local = layout::local_shape({shape, layout}, plan.mesh, plan.rank);
  return std::accumulate(local.begin(), local.end(), std::int64_t{1}, std::multiplies<>());
}

PlannedCollective collective_of(
    const layout::RedistributionStep& step,
    Phase phase,
    const plan::ResolvedBoundary& boundary,
    const RunPlan& plan
) {
  std::vector<std::string> axes;
  std::string name;
  for (const int axis : step.axes) {
    axes.push_back(plan.mesh.axes()[static_cast<std::size_t>(axis)].name);
    name += (name.empty() ? "" : "+") + axes.back();
  }
  const std::int64_t bytes = element_bytes(boundary.dtype);
  // The whole of what is joined or taken apart, as the engine's own collectives count.
  const layout::Layout& whole = step.kind == Kind::kAllGather ? step.to : step.from;
  return {
      .phase = phase,
      .op = op_of(step.kind),
      .axis = name,
      .tier = plan.mesh.tier(axes),
      .unit = plan::to_text(boundary.site),
      .payload_bytes = local_numel(boundary.shape, whole, plan) * bytes,
      .sent_bytes = layout::step_traffic(step, boundary.shape, plan.mesh, plan.rank).sent * bytes
  };
}

void add_flow(
    RunPlan& plan,
    const plan::ResolvedBoundary& boundary,
    const plan::BoundaryFlow& flow,
    Phase phase
) {
  for (const layout::RedistributionStep& step : flow.steps) {
    if (step.communicates()) {
      plan.crossings.push_back(collective_of(step, phase, boundary, plan));
    }
  }
}

}  // namespace

void add_crossings(RunPlan& plan, const RunConfig& config) {
  for (const plan::ResolvedBoundary& boundary : plan.resolved->boundaries) {
    const bool runs_again = config.model.recompute && boundary.site.module.starts_with("blocks.");
    for (std::int64_t time = 0; time < boundary.crossings * config.batch.accumulation; ++time) {
      add_flow(plan, boundary, boundary.forward, Phase::kForward);
      if (runs_again) {
        add_flow(plan, boundary, boundary.forward, Phase::kBackward);
      }
      if (boundary.backward.has_value()) {
        add_flow(plan, boundary, *boundary.backward, Phase::kBackward);
      }
    }
  }
}

}  // namespace hypershard::train::internal
