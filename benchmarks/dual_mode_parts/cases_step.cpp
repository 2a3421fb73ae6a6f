// Steps of a mid-size GPT under a tensor-parallel plan.
#include <map>
#include <string>
#include <vector>

#include "cases.h"
#include "hand_gpt.h"
#include <nlohmann/json.hpp>

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

using Json = nlohmann::ordered_json;

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
    for (auto& parameter : parameters) {
      parameter.mutable_grad() = at::Tensor();
    }
    const auto loss = model->loss(tokens, targets);
    loss.backward();
    return loss.item<double>();
  }

  std::shared_ptr<const comm::ProcessMesh> mesh;
  model::Gpt model;
  std::vector<at::Tensor> parameters = model->parameters();
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

/// How often each operator runs more often (or, negative, less often) in `found`.
std::map<std::string, int> differences(
    const std::vector<std::string>& found, const std::vector<std::string>& expected
) {
  std::map<std::string, int> counts;
  for (const auto& name : found) {
    ++counts[name];
  }
  for (const auto& name : expected) {
    --counts[name];
  }
  std::erase_if(counts, [](const auto& item) { return item.second == 0; });
  return counts;
}

}  // namespace

std::string measure_step(const std::shared_ptr<comm::World>& world, int pairs) {
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
  result["extra_operators"] =
      static_cast<std::int64_t>(found_trace.size()) - static_cast<std::int64_t>(hand_trace.size());
  result["differences"] = differences(found_trace, hand_trace);
  result["same_trace"] = found_trace == hand_trace;
  return result.dump();
}

std::string measure_validation(const std::shared_ptr<comm::World>& world, int pairs) {
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
  return result.dump();
}

}  // namespace hypershard::bench
