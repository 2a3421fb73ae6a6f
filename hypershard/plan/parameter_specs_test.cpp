// Plans under fully_shard: what a plan cuts and what it leaves Partial is trained as the plain
// model is, for every strategy.
#include "hypershard/plan/parameter_specs.h"

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "hypershard/nn/hooks.h"
#include "hypershard/plan/test_lab.h"
#include "hypershard/shard/fully_shard.h"

namespace hypershard::plan {
namespace {

using layout::Layout;
using layout::Placement;
using layout::Strategy;

struct Case {
  const char* name;
  std::vector<layout::MeshAxis> axes;
  Strategy strategy;
  ShardingPlan (*plan)();
};

/// This rank's rows and how they lie: cut over the data axes.
struct Rows {
  Rows(const at::Tensor& whole, const comm::ProcessMesh& mesh)
      : layout(layout::replicated_layout(mesh.mesh())) {
    for (std::size_t i = 0; i < mesh.mesh().axes().size(); ++i) {
      const layout::MeshAxis& axis = mesh.mesh().axes()[i];
      if (axis.name != "tp") {
        layout.placements[i] = Placement::shard(0);
        data_axes.push_back(axis.name);
      }
    }
    local = test::part_of(whole, layout, mesh);
  }
  Layout layout;
  std::vector<std::string> data_axes;
  at::Tensor local;
};

class ParameterSpecsTest : public ::testing::TestWithParam<Case> {};

TEST_P(ParameterSpecsTest, PlannedAndShardedModelTrainsAsThePlainOne) {
  const Case& c = GetParam();
  int size = 1;
  for (const auto& axis : c.axes) {
    size *= axis.size;
  }
  testing::run_ranks(size, [&](std::shared_ptr<comm::World> world) {
    const auto mesh = test::make_mesh(std::move(world), c.axes);
    test::Lab reference(std::make_shared<test::LabSwitches>());
    test::Lab lab(std::make_shared<test::LabSwitches>());
    const at::Tensor whole = test::lab_tokens();
    const Rows rows(whole, *mesh);
    const auto applied = apply_plan(
        *lab,
        c.plan(),
        mesh,
        {{rows.local, {whole.sizes().vec(), rows.layout}, "tokens"}},
        [&] { return std::vector<at::Tensor>{lab->forward(rows.local)}; },
        {.data_axes = rows.data_axes},
        {.reduce_gradients = false}
    );
    shard::FullyShardOptions options;
    options.strategy = c.strategy;
    options.units = {"layer"};
    options.parameters = parameter_specs(applied.resolved());
    const shard::ShardedModel sharded = shard::fully_shard(*lab, *mesh, options);
    for (int step = 0; step < 3; ++step) {
      reference->zero_grad();
      sharded.zero_grad();
      reference->forward(whole).backward();
      lab->forward(rows.local).backward();
      sharded.begin_update();
      const at::NoGradGuard no_grad;
      for (const auto& item : reference->named_parameters()) {
        if (item.key() == "head.weight") {
          continue;  // the embedding's
        }
        const at::Tensor& gradient = item.value().grad();
        const at::Tensor expected = gradient.defined() ? gradient : at::zeros_like(item.value());
        const at::Tensor found = sharded.full_gradient(item.key());
        ASSERT_EQ(found.sizes(), expected.sizes()) << item.key();
        ASSERT_LE((found - expected).abs().max().item<double>(), 1e-13) << item.key();
        item.value().sub_(expected, 0.1);
      }
      for (const shard::UpdateTensor& update : sharded.update_parameters()) {
        at::Tensor tensor = update.tensor;
        tensor.sub_(tensor.grad(), 0.1);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Plans,
    ParameterSpecsTest,
    ::testing::Values(
        Case{"tp2", {{"tp", 2}}, Strategy::kZero3, test::lab_tensor_parallel},
        Case{"sp2", {{"tp", 2}}, Strategy::kZero3, test::lab_sequence_parallel},
        Case{"zero3_tp", {{"shard", 2}, {"tp", 2}}, Strategy::kZero3, test::lab_tensor_parallel},
        Case{"zero3_sp", {{"shard", 2}, {"tp", 2}}, Strategy::kZero3, test::lab_sequence_parallel},
        Case{"zero1_sp", {{"shard", 2}, {"tp", 2}}, Strategy::kZero1, test::lab_sequence_parallel},
        Case{"ddp_sp", {{"replicate", 2}, {"tp", 2}}, Strategy::kDdp, test::lab_sequence_parallel},
        Case{
            "hsdp_sp",
            {{"replicate", 2}, {"shard", 1}, {"tp", 2}},
            Strategy::kHsdp,
            test::lab_sequence_parallel
        },
        Case{
            "hierarchical_sp",
            {{"replicate", 1}, {"shard", 2}, {"tp", 2}},
            Strategy::kHierarchical,
            test::lab_sequence_parallel
        }
    ),
    [](const auto& each) { return std::string(each.param.name); }
);

// What a forward does beside computing.
struct BeforeForward final : nn::ForwardHooks {
  explicit BeforeForward(std::function<void()> action_in) : action(std::move(action_in)) {}
  void pre_forward(std::span<at::Tensor* const>) override { action(); }
  void post_forward(std::span<at::Tensor* const>) override {}
  std::function<void()> action;
};

TEST(ShardedValidationTest, AReadOfAReshardedParameterNamesItItsUnitAndTheWayOut) {
  testing::run_ranks(4, [](std::shared_ptr<comm::World> world) {
    const auto mesh = test::make_mesh(std::move(world), {{"shard", 2}, {"tp", 2}});
    test::Lab lab(std::make_shared<test::LabSwitches>());
    const Rows rows(test::lab_tokens(), *mesh);
    const auto applied = apply_plan(
        *lab,
        test::lab_sequence_parallel(),
        mesh,
        {{rows.local, {test::lab_tokens().sizes().vec(), rows.layout}, "tokens"}},
        [&] { return std::vector<at::Tensor>{lab->forward(rows.local)}; },
        {.data_axes = rows.data_axes},
        {.reduce_gradients = false}
    );
    shard::FullyShardOptions options;
    options.units = {"layer"};
    options.parameters = parameter_specs(applied.resolved());
    options.share = shard::Share::kOff;
    const shard::ShardedModel sharded = shard::fully_shard(*lab, *mesh, options);
    const auto validated_step = [&] {
      ValidationGuard guard(*lab, applied, {.has_engine = true});
      lab->forward(rows.local).backward();
      guard.finish();
      EXPECT_EQ(guard.counts().backwards, 1);
    };
    EXPECT_EQ(test::thrown_by(validated_step), "");
    sharded.zero_grad();
    // The unit is apart again by then, and nobody gathers it for another module.
    lab->norm->add_forward_hooks(std::make_shared<BeforeForward>([&] {
      (void)lab->layer->norm1->weight.sum();
    }));
    const std::string text = test::thrown_by(validated_step);
    HS_EXPECT_HAS(text, "a parameter of unit 'layer' (layer.norm1.weight, layer.norm2.weight)");
    HS_EXPECT_HAS(text, "was accessed while the unit is resharded");
    HS_EXPECT_HAS(text, "To read it call unshard(\"layer\") first, or full_parameter(name)");
  });
}

TEST(ParameterSpecsNamesTest, BuffersAreLeftOut) {
  ResolvedPlan plan;
  plan.parameters.push_back({.name = "w", .reduce_axes = {"tp"}});
  plan.parameters.push_back({.name = "table", .is_buffer = true});
  const auto specs = parameter_specs(plan);
  ASSERT_EQ(specs.size(), 1);
  EXPECT_EQ(specs.at("w").reduce_axes, std::vector<std::string>{"tp"});
}

}  // namespace
}  // namespace hypershard::plan
