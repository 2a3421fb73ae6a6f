// See boundary_traffic.h.
#include "hypershard/train/internal/boundary_traffic.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "hypershard/comm/traffic.h"
#include "hypershard/core/error.h"
#include "hypershard/layout/redistribution.h"
#include "hypershard/layout/sharding.h"
#include "hypershard/nn/cross_entropy.h"
#include "hypershard/train/session.h"

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

/// Axes as a communicator over them is known.
struct AxisNames {
  std::vector<std::string> names;
  std::string joined;
};

AxisNames names_of(const std::vector<int>& axes, const layout::DeviceMesh& mesh) {
  AxisNames result;
  for (const int axis : axes) {
    result.names.push_back(mesh.axes()[static_cast<std::size_t>(axis)].name);
    result.joined += (result.joined.empty() ? "" : "+") + result.names.back();
  }
  return result;
}

std::int64_t local_numel(
    const std::vector<std::int64_t>& shape, const layout::Layout& layout, const RunPlan& plan
) {
  const auto local = layout::local_shape({shape, layout}, plan.mesh, plan.rank);
  return std::accumulate(local.begin(), local.end(), std::int64_t{1}, std::multiplies<>());
}

// A step counts what any all-reduce must send; its communicator cuts it in a way of its own.
std::int64_t sent_bytes(
    const layout::RedistributionStep& step,
    const plan::ResolvedBoundary& boundary,
    const RunPlan& plan,
    const std::vector<std::string>& axes
) {
  const std::int64_t item = element_bytes(boundary.dtype);
  if (step.kind != Kind::kAllReduce) {
    return layout::step_traffic(step, boundary.shape, plan.mesh, plan.rank).sent * item;
  }
  const std::vector<int> group = plan.mesh.group(axes, plan.rank);
  const auto self = std::find(group.begin(), group.end(), plan.rank) - group.begin();
  const std::int64_t numel = local_numel(boundary.shape, step.from, plan);
  return comm::all_reduce_traffic(
             numel, item, static_cast<int>(self), static_cast<int>(group.size())
  )
      .sent;
}

PlannedCollective collective_of(
    const layout::RedistributionStep& step,
    Phase phase,
    const plan::ResolvedBoundary& boundary,
    const RunPlan& plan
) {
  const AxisNames axes = names_of(step.axes, plan.mesh);
  const std::int64_t bytes = element_bytes(boundary.dtype);
  // The whole of what is joined or taken apart, as the engine's own collectives count.
  const layout::Layout& whole = step.kind == Kind::kAllGather ? step.to : step.from;
  return {
      .phase = phase,
      .op = op_of(step.kind),
      .axis = axes.joined,
      .tier = plan.mesh.tier(axes.names),
      .unit = plan::to_text(boundary.site),
      .payload_bytes = local_numel(boundary.shape, whole, plan) * bytes,
      .sent_bytes = sent_bytes(step, boundary, plan, axes.names)
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

// Mesh axes that cut the classes of the loss's logits; none if a boundary makes the logits whole.
std::vector<int> axes_of_classes(const RunPlan& plan, const RunConfig& config) {
  const std::string name = config.model.tie_embeddings ? "embed.weight" : "head.weight";
  for (const plan::ResolvedBoundary& boundary : plan.resolved->boundaries) {
    const auto last = static_cast<int>(boundary.shape.size()) - 1;
    if (boundary.site.module == "head" && boundary.site.kind == plan::RuleKind::kOutput &&
        boundary.forward.leaving.cut_axes(last).empty()) {
      return {};
    }
  }
  std::vector<int> axes;
  for (const int axis : plan.resolved->find_parameter(name)->spec.layout.cut_axes(0)) {
    if (plan.mesh.axes()[static_cast<std::size_t>(axis)].size > 1) {
      axes.push_back(axis);
    }
  }
  return axes;
}

void add_loss(RunPlan& plan, const RunConfig& config) {
  const std::vector<int> cut_by = axes_of_classes(plan, config);
  if (cut_by.empty()) {
    return;
  }
  const AxisNames axes = names_of(cut_by, plan.mesh);
  std::int64_t num_ranks = 1;
  for (const int axis : cut_by) {
    num_ranks *= plan.mesh.axes()[static_cast<std::size_t>(axis)].size;
  }
  const std::int64_t rows =
      config.batch.global_batch * config.model.sequence /
      (config.batch.accumulation * config.num_data_ranks(plan.mesh.topology().world_size()));
  const std::int64_t bytes = nn::cross_entropy_gathered_numel(rows, num_ranks) *
                             (compute_dtype(config) == at::kDouble ? 8 : 4);
  for (std::int64_t micro = 0; micro < config.batch.accumulation; ++micro) {
    plan.crossings.push_back(
        {.phase = Phase::kForward,
         .op = comm::Op::kAllGather,
         .axis = axes.joined,
         .tier = plan.mesh.tier(axes.names),
         .unit = "cross_entropy",
         .payload_bytes = bytes,
         .sent_bytes = bytes - bytes / num_ranks}
    );
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
  add_loss(plan, config);
}

}  // namespace hypershard::train::internal
