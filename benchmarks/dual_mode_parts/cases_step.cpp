// Steps of a mid-size GPT under a tensor-parallel plan.
#include <string>
#include <vector>

#include "cases.h"
#include "hand_gpt.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/record_function.h>

#include "hypershard/core/error.h"
#include "hypershard/layout/sharding.h"
#include "hypershard/model/gpt_plan.h"
#include "hypershard/plan/apply.h"
#include "hypershard/plan/validation.h"

namespace hypershard::bench {
namespace {

constexpr std::int64_t kBatch = 4;
constexpr std::int64_t kPositions = 64;

model::GptConfig mid_config() {
  return {
      .vocab_size = 8192, .num_layers = 8, .dim = 512, .num_heads = 8, .max_sequence = kPositions
  };
}

at::Tensor tokens_from(std::int64_t start) {
  return at::arange(start, start + kBatch * kPositions, at::kLong)
      .mul(5)
      .add(17)
      .remainder(8192)
      .view({kBatch, kPositions});
}

/// A GPT under the tensor-parallel plan.
struct PlannedGpt {
  explicit PlannedGpt(const std::shared_ptr<comm::World>& world)
      : mesh(std::make_shared<const comm::ProcessMesh>(
            world, layout::DeviceMesh({{"tp", world->size()}}, world->topology())
        )),
        model(mid_config()) {}

  void apply() {
    const layout::TensorSpec spec{tokens.sizes().vec(), layout::replicated_layout(mesh->mesh())};
    applied = plan::apply_plan(
        *model,
        model::gpt_plan(mid_config(), mesh->mesh()),
        mesh,
        {{tokens, spec, "tokens"}, {targets, spec, "targets"}},
        [&] { return std::vector<at::Tensor>{model->loss(tokens, targets)}; }
    );
  }
  double step() {
    model->zero_grad();
    const auto loss = model->loss(tokens, targets);
    loss.backward();
    return loss.item<double>();
  }

  std::shared_ptr<const comm::ProcessMesh> mesh;
  model::Gpt model;
  at::Tensor tokens = tokens_from(0);
  at::Tensor targets = tokens_from(1);
  plan::AppliedPlan applied;
};

/// Operators of a step in order, nested ones too.
template <class Body>
std::vector<std::string> trace_of(const Body& body) {
  static thread_local std::vector<std::string>* names = nullptr;
  std::vector<std::string> list;
  names = &list;
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(
          [](const at::RecordFunction& fn) -> std::unique_ptr<at::ObserverContext> {
            const std::string name = fn.name();
            if (!name.starts_with("autograd::engine::")) {  // nodes, not operators
              names->push_back(name);
            }
            return nullptr;
          }
      ).scopes({at::RecordScope::FUNCTION})
  );
  body();
  at::removeCallback(handle);
  return list;
}

/// How many operators `found` has that `expected` does not have in their place.
std::int64_t differences(
    const std::vector<std::string>& found, const std::vector<std::string>& expected
) {
  std::size_t common = 0;
  while (common < found.size() && common < expected.size() && found[common] == expected[common]) {
    ++common;
  }
  return static_cast<std::int64_t>(std::max(found.size(), expected.size()) - common);
}

}  // namespace

Json measure_step(const std::shared_ptr<comm::World>& world, int pairs) {
  PlannedGpt planned(world);
  HandGpt hand(*planned.model, planned.mesh->axis("tp"));
  planned.apply();
  const auto hand_step = [&] {
    for (const auto& parameter : hand.parameters()) {
      parameter.mutable_grad() = at::Tensor();
    }
    const auto loss = hand.loss(planned.tokens, planned.targets);
    loss.backward();
    return loss.item<double>();
  };
  const auto step = [&] { planned.step(); };
  const double loss = planned.step();
  const double expected = hand_step();
  HS_CHECK_EQ(loss, expected, "bench: the plan and the model by hand compute different losses");
  const auto found_trace = trace_of(step);
  const auto hand_trace = trace_of(hand_step);
  Json result = paired(world, pairs, step, hand_step);
  result["loss"] = loss;
  result["operators"] = hand_trace.size();
  result["extra_operators"] = differences(found_trace, hand_trace);
  return result;
}

Json measure_validation(const std::shared_ptr<comm::World>& world, int pairs) {
  PlannedGpt planned(world);
  planned.apply();
  const double expected = planned.step();
  double found = 0;
  const auto validated = [&] {
    plan::ValidationGuard guard(*planned.model, planned.applied);
    found = planned.step();
    guard.finish();
  };
  Json result = paired(world, pairs, validated, [&] { planned.step(); });
  HS_CHECK_EQ(found, expected, "bench: a validated step computes another loss");
  return result;
}

}  // namespace hypershard::bench
