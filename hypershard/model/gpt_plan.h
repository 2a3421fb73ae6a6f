// Ready-made sharding plans of the GPT: who holds which heads, hidden units, positions and rows of
// the vocabulary.
#pragma once

#include <string>

#include "hypershard/layout/mesh.h"
#include "hypershard/model/gpt_config.h"
#include "hypershard/plan/sharding_plan.h"

namespace hypershard::model {

/// What a plan of the GPT cuts along one axis. All may be combined.
struct GptPlanOptions {
  std::string axis = "tp";
  /// Heads and hidden units: wq, wk, wv, w1, w3 by rows, wo and w2 by columns; activations are
  /// reduced behind attention and feed-forward.
  bool tensor = true;
  /// Positions, between attention and feed-forward: norms and additions work on pieces, a gather
  /// and a reduce-scatter take the place of each reduction. With `tensor` only.
  bool sequence = false;
  /// Rows of embed.weight and head.weight (one matrix if tied). Logits stay cut, and the loss is
  /// computed from the pieces.
  bool vocabulary = false;
};

/// Returns the plan of a GPT of this configuration.
///
/// Dropout needs care that a plan cannot take: random states must agree on the axis where
/// activations are whole and differ where positions are cut. Sampling from a model with `sequence`
/// is refused on all ranks before the first token: single positions cannot be cut.
/// Errors: InvalidArgument for an axis that the mesh does not have, heads or heads of keys that do
/// not divide by the axis, `sequence` without `tensor`, or options that cut nothing. Hidden units,
/// positions and vocabulary may be uneven.
plan::ShardingPlan gpt_plan(
    const GptConfig& config, const layout::DeviceMesh& mesh, const GptPlanOptions& options = {}
);

}  // namespace hypershard::model
