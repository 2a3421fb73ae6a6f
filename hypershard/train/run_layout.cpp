// See run_layout.h.
#include "hypershard/train/run_layout.h"

#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>

#include "hypershard/core/error_context.h"
#include "hypershard/model/gpt.h"
#include "hypershard/model/gpt_plan.h"
#include "hypershard/plan/plan_config.h"
#include "hypershard/train/session.h"

namespace hypershard::train {
namespace {

std::vector<std::string> data_axes_of(const layout::DeviceMesh& mesh) {
  std::vector<std::string> names;
  for (const layout::MeshAxis& axis : mesh.axes()) {
    if (axis.name != "tp") {
      names.push_back(axis.name);
    }
  }
  return names;
}

// Rows are dealt to the data ranks; ranks of one tp group read the same ones.
layout::Layout row_layout(const layout::DeviceMesh& mesh) {
  layout::Layout layout = layout::replicated_layout(mesh);
  for (std::size_t axis = 0; axis < mesh.axes().size(); ++axis) {
    if (mesh.axes()[axis].name != "tp") {
      layout.placements[axis] = layout::Placement::shard(0);
    }
  }
  return layout;
}

}  // namespace

plan::ShardingPlan make_sharding_plan(
    const RunConfig& config, const model::GptConfig& shape, const layout::DeviceMesh& mesh
) {
  plan::ShardingPlan plan;
  const ParallelSection& parallel = config.parallel;
  if (parallel.tp > 1 && !parallel.plan.empty()) {
    plan.add(model::gpt_plan(
        shape,
        mesh,
        {.tensor = parallel.has_plan("tensor"),
         .sequence = parallel.has_plan("sequence"),
         .vocabulary = parallel.has_plan("vocabulary")}
    ));
  }
  plan.add(plan::make_plan(config.plan));
  return plan;
}

plan::ResolvedPlan resolve_layout(
    const RunConfig& config, const model::GptConfig& shape, const layout::DeviceMesh& mesh, int rank
) {
  const ErrorContext context("resolve plan");
  // In the dtype that is computed in, so that boundaries tell the bytes that will cross.
  model::GptImpl model(
      shape, {.device = at::kMeta, .dtype = compute_dtype(config), .seed = std::nullopt}
  );
  const std::int64_t rows =
      config.batch.global_batch /
      (config.batch.accumulation * config.num_data_ranks(mesh.topology().world_size()));
  const auto tokens = [&] {
    return at::empty(
        {rows, config.model.sequence}, at::TensorOptions().dtype(at::kLong).device(at::kMeta)
    );
  };
  const at::Tensor input = tokens();
  const at::Tensor target = tokens();
  return plan::resolve(
      model,
      make_sharding_plan(config, shape, mesh),
      mesh,
      rank,
      {{input, plan::even_spec(input, row_layout(mesh), mesh), "tokens"},
       {target, plan::even_spec(target, row_layout(mesh), mesh), "targets"}},
      [&] { return std::vector<at::Tensor>{model.loss(input, target)}; },
      {.data_axes = data_axes_of(mesh)}
  );
}

plan::AppliedPlan apply_layout(
    const RunConfig& config,
    const model::GptConfig& shape,
    torch::nn::Module& model,
    std::shared_ptr<const comm::ProcessMesh> mesh
) {
  plan::ResolvedPlan resolved = resolve_layout(config, shape, mesh->mesh(), mesh->rank());
  return plan::apply_plan(model, std::move(resolved), std::move(mesh), {.reduce_gradients = false});
}

}  // namespace hypershard::train
