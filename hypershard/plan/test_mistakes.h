// The table of seeded mistakes. One kind never gets this far: tied weights with different layouts
// are refused when a plan is applied (TiedWeightsCannotLieDifferently in lab_test.cpp).
#pragma once

#include <vector>

#include "hypershard/plan/test_mistake.h"

namespace hypershard::plan::test {

inline const std::vector<Mistake>& mistakes() {
  static const Placement kRep = Placement::replicate();
  static const std::vector<Mistake> all{
      // The plan is wrong.
      {.name = "missing_reduction_of_mlp",
       .place = "aten::add.Tensor in layer: ",
       .what = "is added to an operand that is Partial(sum) on axis tp",
       .fix = "reduce the Partial operand before, or make the other one Partial too",
       .edit =
           [](const ShardingPlan& plan) {
             auto edited = without(plan, RuleKind::kOutput, "layer.{attn,mlp}");
             return edited.output("layer.attn", {{"tp", kRep}});
           }},
      {.name = "missing_reduction_of_attention",
       .place = "aten::add.Tensor in layer: ",
       .what = "is added to an operand that is Partial(sum) on axis tp",
       .fix = "reduce the Partial operand before, or make the other one Partial too",
       .edit =
           [](const ShardingPlan& plan) {
             auto edited = without(plan, RuleKind::kOutput, "layer.{attn,mlp}");
             return edited.output("layer.mlp", {{"tp", kRep}});
           }},
      {.name = "missing_input_boundary_of_mlp",
       .place = "the gradient of the result of aten::add.Tensor in layer in layer.mlp.up: ",
       .what = "on axis 'tp' it is Partial from aten::linear in layer.mlp.up",
       .fix = "a boundary is missing: state an input of layer.mlp.up",
       .edit =
           [](const ShardingPlan& plan) {
             auto edited = without(plan, RuleKind::kInput, "layer.{attn,mlp}");
             return edited.input("layer.attn", {{"tp", kRep}});
           }},
      {.name = "missing_input_boundary_of_attention",
       .place = "the gradient of the result of aten::add.Tensor in embed",
       .what = "on axis 'tp' it is Partial from aten::linear in layer.attn",
       .fix = "a boundary is missing: state an input of layer.attn",
       .edit =
           [](const ShardingPlan& plan) {
             auto edited = without(plan, RuleKind::kInput, "layer.{attn,mlp}");
             return edited.input("layer.mlp", {{"tp", kRep}});
           }},
      {.name = "missing_gather_before_tied_head",
       .plan = lab_sequence_parallel,
       .place = "result 0 of the forward",
       .what = "it is Partial(avg) on axis 'tp'",
       .fix = "state the output that it comes from as {tp = \"replicate\"}",
       .edit = [](const ShardingPlan& plan) { return without(plan, RuleKind::kOutput, "layer"); }},
      {.name = "head_input_left_cut",
       .plan = lab_sequence_parallel,
       .place = "the gradient of 'embed.weight'",
       .what = "on axis 'tp' it is Partial from aten::linear in head",
       .fix = "a boundary is missing: state an input of head",
       .edit =
           [](const ShardingPlan& plan) {
             auto edited = without(plan, RuleKind::kOutput, "layer");
             return edited.output("head", {{"tp", kRep}});
           }},
      {.name = "boundary_on_the_wrong_dimension",
       .plan = lab_sequence_parallel,
       .place = "aten::add.Tensor in layer: ",
       .what = "dimension 1 of 'other' runs over the index that 'self' is cut along",
       .fix = "redistribute 'other' to Shard(1), or 'self' to another layout",
       .edit =
           [](const ShardingPlan& plan) {
             auto edited = without(plan, RuleKind::kOutput, "layer.{attn,mlp}");
             return edited.output(
                              "layer.mlp", {{"tp", Placement::shard(1)}}
             ).output("layer.attn", {{"tp", Placement::shard(0)}});
           }},
      {.name = "replicated_input_into_a_row_parallel_weight",
       .place = "aten::linear in layer.mlp.down: ",
       .what = "does not fit the other operands",
       .fix = "local shapes fit, global ones do not; redistribute the operands to layouts that cut "
              "the same dimension",
       .edit =
           [](const ShardingPlan& plan) {
             ShardingPlan edited = plan;
             return edited.output("layer.mlp.up", {{"tp", kRep}});
           }},
      {.name = "rows_of_a_table_cut_that_are_read_whole",
       .place = "aten::embedding in embed: ",
       .what = "the operator needs every entry of this dimension on each rank",
       .fix = "redistribute 'weight' to Replicate, or to Shard of another dimension",
       .edit =
           [](const ShardingPlan& plan) {
             ShardingPlan edited = plan;
             return edited.parameter(
                              "embed.weight", {{"tp", Placement::shard(0)}}
             ).output("head", {{"tp", kRep}});
           }},
      // What was resolved is not what is installed.
      {.name = "forgotten_norm_under_sequence_parallelism",
       .plan = lab_sequence_parallel,
       .place = "the gradient of parameter layer.norm1.weight",
       .what = "it is Partial(sum) on axis 'tp' and nothing reduces it there",
       .fix = "resolve the plan again",
       .spoil_resolved =
           [](ResolvedPlan& plan) {
             for (auto& parameter : plan.parameters) {
               if (parameter.name == "layer.norm1.weight") {
                 parameter.reduce_axes.clear();
               }
             }
           }},
      {.name = "reduction_of_a_whole_gradient",
       .place = "the gradient of parameter norm.weight",
       .what = "it is Replicate on axis 'tp' and is reduced there nevertheless",
       .fix = "resolve the plan again",
       .spoil_resolved =
           [](ResolvedPlan& plan) {
             for (auto& parameter : plan.parameters) {
               if (parameter.name == "norm.weight") {
                 parameter.reduce_axes = {"tp"};
               }
             }
           }},
      {.name = "nobody_reduces_gradients",
       .plan = lab_sequence_parallel,
       .place = "the gradient of parameter layer.norm1.weight",
       .what = "hold different values along axis 'tp'",
       .fix = "nobody reduces it",
       .reduce_gradients = false},
      {.name = "boundary_dropped",
       .place = "aten::add.Tensor in layer: ",
       .what = "is added to an operand that is Partial(sum) on axis tp",
       .fix = "reduce the Partial operand before, or make the other one Partial too",
       .spoil_resolved =
           [](ResolvedPlan& plan) {
             for (auto& boundary : plan.boundaries) {
               if (to_text(boundary.site) == "output 0 of layer.mlp") {
                 boundary.crossings = 0;
               }
             }
           }},
      {.name = "boundary_resolved_for_another_layout",
       .place = "output 0 of layer.mlp",
       .what = "arrives, but the boundary was resolved for {tp: Replicate}",
       .fix = "resolve the plan with inputs as the model gets them",
       .spoil_resolved =
           [](ResolvedPlan& plan) {
             for (auto& boundary : plan.boundaries) {
               if (to_text(boundary.site) == "output 0 of layer.mlp") {
                 boundary.forward.arriving = boundary.forward.leaving;
                 boundary.forward.steps.clear();
               }
             }
           }},
      {.name = "backward_reduction_dropped",
       .place = "the gradient at input 0 of layer.mlp",
       .what = "hold different values along axis 'tp'",
       .fix = "does not reduce",
       .spoil_resolved =
           [](ResolvedPlan& plan) {
             for (auto& boundary : plan.boundaries) {
               if (to_text(boundary.site) == "input 0 of layer.mlp") {
                 boundary.backward->arriving = boundary.backward->leaving;
               }
             }
           }},
      {.name = "boundary_removed_by_the_program",
       .place = "aten::add.Tensor in layer: ",
       .what = "is added to an operand that is Partial(sum) on axis tp",
       .fix = "reduce the Partial operand before, or make the other one Partial too",
       .spoil = [](LabRun& run) { run.applied->remove(); }},
      // The model's code is wrong under the plan.
      {.name = "own_reduction",
       .place = "before results of layer.mlp",
       .what = "a collective ran that the plan does not know",
       .fix = "a second reduction makes values too large",
       .is_switch = true},
      {.name = "bias_before_reduction",
       .place = "aten::add.Tensor in layer.mlp: ",
       .what = "is added to an operand that is Partial(sum) on axis tp",
       .fix = "reduce the Partial operand before, or make the other one Partial too",
       .is_switch = true},
      {.name = "constant_before_reduction",
       .place = "aten::add.Scalar in layer.mlp: ",
       .what = "a constant is added to an operand that is Partial(sum) on axis tp",
       .fix = "reduce the Partial operand before, or make the other one Partial too",
       .is_switch = true},
      {.name = "residual_before_reduction",
       .place = "aten::add.Tensor in layer.mlp: ",
       .what = "is added to an operand that is Partial(sum) on axis tp",
       .fix = "reduce the Partial operand before, or make the other one Partial too",
       .is_switch = true},
      {.name = "gelu_before_reduction",
       .place = "aten::gelu in layer.mlp: ",
       .what = "it is not linear in this operand",
       .fix = "reduce 'self' before, to Replicate or Shard: a boundary is missing behind what "
              "makes it Partial",
       .is_switch = true},
      {.name = "square_before_reduction",
       .place = "aten::mul.Tensor in layer.mlp: ",
       .what = "a product of sums is not the sum of the terms' products",
       .fix = "reduce one of them before",
       .is_switch = true},
      {.name = "norm_over_cut_dim",
       .place = "aten::add.Scalar in layer.mlp: ",
       .what = "a constant is added to an operand that is Partial(avg) on axis tp",
       .fix = "reduce the Partial operand before, or make the other one Partial too",
       .is_switch = true},
      {.name = "max_over_cut_dim",
       .place = "aten::add.Scalar in layer.mlp: ",
       .what = "it is not monotone in this operand",
       .fix = "reduce 'self' before, to Replicate or Shard: a boundary is missing behind what "
              "makes it "
              "Partial",
       .is_switch = true},
      {.name = "centred_over_cut_dim",
       .place = "aten::sub.Tensor in layer.mlp: ",
       .what = "a piece of one does not belong to a term of the other",
       .fix = "reduce 'other' before, to Replicate or Shard",
       .is_switch = true},
      {.name = "softmax_over_heads",
       .place = "aten::softmax.int in layer.attn: ",
       .what = "the operator needs every entry of this dimension on each rank",
       .fix = "redistribute 'self' to Replicate, or to Shard of another dimension",
       .is_switch = true},
      {.name = "positions_over_cut_dim",
       .plan = lab_sequence_parallel,
       .place = "aten::sub.Tensor in layer: ",
       .what = "a piece of one does not belong to a term of the other",
       .fix = "reduce 'other' before, to Replicate or Shard",
       .is_switch = true},
      {.name = "prefix_per_rank",
       .plan = lab_sequence_parallel,
       .place = "aten::cat in layer: ",
       .what = "the operator needs every entry of this dimension on each rank",
       .fix = "redistribute 'tensors[0]' to Replicate, or to Shard of another dimension",
       .is_switch = true},
      // Ranks do not do the same.
      {.name = "rank_scale",
       .place = "result 0 of layer.norm1: ranks 0 and 1",
       .what = "hold different values along axis 'tp', on which it is Replicate",
       .fix = "validate with level `operators`",
       .is_switch = true},
      {.name = "rank_branch",
       .place = "since the ranks last met",
       .what = "rank 1 ran aten::add.Scalar in layer ",
       .fix = "let nothing that differs between ranks",
       .is_switch = true},
      {.name = "rank_dtype",
       .place = "since the ranks last met",
       .what = "rank 1 ran aten::to.dtype in layer ",
       .fix = "let nothing that differs between ranks",
       .is_switch = true,
       .went_wrong = losses_differ},
      {.name = "rank_rows",
       .place = "result 0 of layer.norm1: ranks 0 and 1",
       .what = "hold different values along axis 'tp', on which it is Replicate",
       .fix = "validate with level `operators`",
       .is_switch = true},
      {.name = "other_data_along_tp",
       .place = "input 0 of the model",
       .what = "hold different values along axis 'tp', on which it is Replicate",
       .fix = "give these ranks the same data",
       .spoil = [](LabRun& run) { run.tokens = (run.tokens + run.mesh->rank()).remainder(kVocab); }
      },
      {.name = "other_initial_values",
       .place = "parameter norm.weight",
       .what = "ranks 0 and 1 hold different values along axis 'tp'",
       .fix = "the same seed",
       .spoil =
           [](LabRun& run) {
             const at::NoGradGuard no_grad;
             run.lab->norm->weight.add_(0.1 * run.mesh->rank());
           }},
      {.name = "other_initial_values_along_dp",
       .place = "parameter norm.weight",
       .what = "ranks 0 and 2 hold different values along axis 'dp'",
       .fix = "the same seed",
       .spoil =
           [](LabRun& run) {
             const at::NoGradGuard no_grad;
             run.lab->norm->weight.add_(run.mesh->rank() < 2 ? 0.0 : 0.1);
           },
       .has_dp = true},
      {.name = "gradient_edited_by_rank",
       .place = "the gradient of parameter norm.weight",
       .what = "hold different values along axis 'tp'",
       .fix = "a hook on it that does something else on each rank",
       .spoil =
           [](LabRun& run) {
             const double factor = 1.0 + run.mesh->rank();
             run.lab->norm->weight.register_hook([factor](const at::Tensor& gradient) {
               return gradient * factor;
             });
           }},
      {.name = "gradient_reduced_twice",
       .plan = lab_sequence_parallel,
       .place = "before the gradient at input 0 of layer in (root): ",
       .what = "a collective ran that the plan does not know",
       .fix = "a second reduction makes values too large",
       .spoil =
           [](LabRun& run) {
             const auto ranks = run.mesh->axis("tp");
             run.lab->layer->norm1->weight.register_hook([ranks](const at::Tensor& gradient) {
               at::Tensor sum = gradient.clone();
               ranks->all_reduce(sum, comm::ReduceOp::kSum, "my own")->wait();
               return sum;
             });
           }},
      // Random numbers.
      {.name = "dropout_seeded_by_rank_on_whole_activations",
       .place = "the random state of aten::bernoulli",
       .what = "hold different values along axis 'tp'",
       .fix = "seed the generator alike",
       .spoil =
           [](LabRun& run) {
             run.switches->dropout.set_current_seed(
                 static_cast<std::uint64_t>(40 + run.mesh->rank())
             );
           },
       .with_dropout = true,
       .went_wrong = losses_differ},
      {.name = "dropout_seeded_alike_on_cut_activations",
       .plan = lab_sequence_parallel,
       .place = "the random state of aten::bernoulli",
       .what = "hold the same values along axis 'tp', on which it is cut",
       .fix = "differently along axes on which it is cut",
       .with_dropout = true,
       .went_wrong = masks_are_equal},
      {.name = "dropout_seeded_alike_along_dp",
       .place = "the random state of aten::bernoulli",
       .what = "ranks 0 and 2 hold the same values along axis 'dp', on which it is cut",
       .fix = "differently along axes on which it is cut",
       .has_dp = true,
       .with_dropout = true,
       .went_wrong = masks_are_equal},
      // One rank's optimizer did something else.
      {.name = "step_on_one_rank",
       .place = "parameter norm.weight",
       .what = "hold different values along axis 'tp'",
       .fix = "make the same step",
       .spoil =
           [](LabRun& run) {
             run.step();
             if (run.mesh->rank() == 0) {
               const at::NoGradGuard no_grad;
               run.lab->norm->weight.sub_(run.lab->norm->weight.grad(), 0.1);
             }
           },
       .went_wrong = parameters_differ},
  };
  return all;
}

}  // namespace hypershard::plan::test
