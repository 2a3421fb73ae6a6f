// What a seeded mistake is, and how a step is known to have gone wrong.
#pragma once

#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "hypershard/plan/test_lab.h"

namespace hypershard::plan::test {

// One run of the lab on this rank.
struct LabRun {
  std::shared_ptr<const comm::ProcessMesh> mesh = {};
  Switches switches = std::make_shared<LabSwitches>();
  Lab reference{nullptr};
  Lab lab{nullptr};
  at::Tensor tokens = lab_tokens();
  std::optional<AppliedPlan> applied = {};

  double dp() const { return mesh->mesh().has_axis("dp") ? mesh->mesh().axis_size("dp") : 1; }
  at::Tensor step() {
    lab->zero_grad();
    at::Tensor loss = lab->forward(tokens);
    loss.backward();
    return loss;
  }
};

struct Mistake {
  const char* name;
  ShardingPlan (*plan)() = lab_tensor_parallel;
  const char* place;  ///< of the error: operator, boundary, parameter
  const char* what;
  const char* fix;
  /// Edits the right plan before it is resolved.
  ShardingPlan (*edit)(const ShardingPlan&) = nullptr;
  /// Spoils what was resolved, the model or its data.
  void (*spoil_resolved)(ResolvedPlan&) = nullptr;
  void (*spoil)(LabRun&) = nullptr;
  bool is_switch = false;  ///< the model's code has it, under its name
  bool reduce_gradients = true;
  bool has_dp = false;
  bool with_dropout = false;
  /// Tells whether a production step went wrong; default: gradients differ from the reference.
  bool (*went_wrong)(LabRun&) = nullptr;
};

inline std::ostream& operator<<(std::ostream& stream, const Mistake& mistake) {
  return stream << mistake.name;
}

inline ShardingPlan without(const ShardingPlan& plan, RuleKind kind, const std::string& pattern) {
  ShardingPlan kept;
  bool hit = false;
  for (const PlanRule& rule : plan.rules()) {
    if (rule.kind == kind && rule.pattern == pattern) {
      hit = true;
    } else {
      kept.add(rule);
    }
  }
  EXPECT_TRUE(hit) << pattern;
  return kept;
}

// Gathers one number a rank.
inline std::vector<double> over_ranks(const LabRun& run, double mine) {
  const auto ranks = run.mesh->world().world_communicator();
  const at::Tensor all = at::zeros({ranks->size()}, at::kDouble);
  ranks->all_gather(all, at::full({1}, mine, at::kDouble))->wait_released();
  return {all.const_data_ptr<double>(), all.const_data_ptr<double>() + all.numel()};
}

inline bool losses_differ(LabRun& run) {
  const auto losses = over_ranks(run, run.step().item<double>());
  return losses[0] != losses[1];
}

inline bool masks_are_equal(LabRun& run) {
  run.step();
  const auto weights = at::arange(run.switches->last_mask.numel(), at::kDouble).sin();
  const auto sums = over_ranks(run, run.switches->last_mask.flatten().dot(weights).item<double>());
  return sums[0] == sums[1];
}

inline bool parameters_differ(LabRun& run) {
  const auto sums = over_ranks(run, run.lab->norm->weight.abs().sum().item<double>());
  return sums[0] != sums[1];
}

}  // namespace hypershard::plan::test
