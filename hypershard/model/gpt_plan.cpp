// The plans in the form in which a user would write them.
#include "hypershard/model/gpt_plan.h"

#include <cstdint>

#include "hypershard/core/error.h"

namespace hypershard::model {
namespace {

using layout::Placement;
using plan::AxisPlacements;
using plan::ShardingPlan;

void check_heads(
    const char* field, std::int64_t heads, const GptPlanOptions& options, std::int64_t parts
) {
  HS_CHECK(
      heads % parts == 0,
      "model.gpt_plan: ",
      field,
      " ",
      heads,
      " does not divide by the ",
      parts,
      " ranks of axis '",
      options.axis,
      "'",
      HS_HINT("make the axis a divisor of ", heads, ", or leave the heads whole (tensor = false)")
  );
}

void check(const GptConfig& config, const layout::DeviceMesh& mesh, const GptPlanOptions& options) {
  const std::int64_t parts = mesh.axis_size(options.axis);
  HS_CHECK(
      options.tensor || options.vocabulary,
      "model.gpt_plan: the options cut nothing along axis '",
      options.axis,
      "' (expected tensor or vocabulary)"
  );
  HS_CHECK(
      options.tensor || !options.sequence,
      "model.gpt_plan: sequence without tensor: between whole attention and feed-forward layers a "
      "cut of positions saves nothing",
      HS_HINT("set tensor too")
  );
  HS_CHECK(
      !options.vocabulary || config.vocab_size > 1 || parts == 1,
      "model.gpt_plan: a vocabulary of ",
      config.vocab_size,
      " cannot be divided among the ",
      parts,
      " ranks of axis '",
      options.axis,
      "' (expected at least 2)"
  );
  if (options.tensor) {
    check_heads("num_heads", config.num_heads, options, parts);
    check_heads("num_kv_heads", config.num_kv_heads, options, parts);
  }
}

}  // namespace

ShardingPlan gpt_plan(
    const GptConfig& config_in, const layout::DeviceMesh& mesh, const GptPlanOptions& options
) {
  const GptConfig config = checked(config_in);
  check(config, mesh, options);
  const auto along = [&](const Placement& placement) {
    return AxisPlacements{{options.axis, placement}};
  };
  const auto whole = along(Placement::replicate());
  // How activations lie between layers, dimension 1 being positions.
  const auto between = options.sequence ? along(Placement::shard(1)) : whole;
  ShardingPlan plan;
  if (options.tensor) {
    for (const char* rows : {"attn.wq", "attn.wk", "attn.wv", "mlp.w1", "mlp.w3"}) {
      plan.parameter(concat_text("blocks.*.", rows, ".weight"), along(Placement::shard(0)));
    }
    for (const char* columns : {"attn.wo", "mlp.w2"}) {
      plan.parameter(concat_text("blocks.*.", columns, ".weight"), along(Placement::shard(1)));
    }
    for (const char* layer : {"blocks.*.attn", "blocks.*.mlp"}) {
      plan.input(layer, whole).output(layer, between);
    }
  }
  if (options.vocabulary) {
    plan.parameter("embed.weight", along(Placement::shard(0)));
    if (!config.tie_embeddings) {
      plan.parameter("head.weight", along(Placement::shard(0)));
    }
  }
  if (options.vocabulary || options.sequence) {
    // Behind the last norm rather than before the head: a tied head is no module.
    plan.output("embed", between).output("norm", whole);
  }
  return plan;
}

}  // namespace hypershard::model
