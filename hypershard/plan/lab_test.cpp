// The lab's right plans: attention with local head counts, tied weights, dropout, shapes that the
// plain model has, on threads and on processes.
#include <gtest/gtest.h>

#include "hypershard/plan/test_lab.h"

namespace hypershard::plan {
namespace {

using layout::Layout;
using layout::Placement;
using test::thrown_by;

struct LabSetup {
  std::shared_ptr<const comm::ProcessMesh> mesh;
  test::Switches switches = std::make_shared<test::LabSwitches>();
  test::Lab lab{nullptr};
  at::Tensor tokens = {};
  Layout layout = {};

  LabSetup(std::shared_ptr<comm::World> world, std::vector<layout::MeshAxis> axes)
      : mesh(test::make_mesh(std::move(world), std::move(axes))), lab(switches) {
    layout = layout::replicated_layout(mesh->mesh());
    if (has_dp()) {
      layout.placements[0] = Placement::shard(0);
    }
    tokens = test::part_of(test::lab_tokens(), layout, *mesh);
  }
  bool has_dp() const { return mesh->mesh().has_axis("dp"); }
  AppliedPlan apply(const ShardingPlan& plan) {
    ResolveOptions options;
    if (has_dp()) {
      options.data_axes = {"dp"};
    }
    return apply_plan(
        *lab,
        plan,
        mesh,
        {{tokens, {test::lab_tokens().sizes().vec(), layout}, "tokens"}},
        [&] { return std::vector<at::Tensor>{lab->forward(tokens)}; },
        options
    );
  }
};

TEST(LabPlanTest, ModelSizesThatIgnoreTheCutAreFound) {
  testing::run_ranks(2, [](std::shared_ptr<comm::World> world) {
    LabSetup setup(std::move(world), {{"tp", 2}});
    setup.switches->mistake = "global_heads";
    const std::string text = thrown_by([&] { setup.apply(test::lab_tensor_parallel()); });
    HS_EXPECT_HAS(text, "aten::view in layer.attn");
    HS_EXPECT_HAS(text, "but the unsharded model computes [2, 2, 4, 2] here");
    HS_EXPECT_HAS(text, "write -1");
  });
}

TEST(LabPlanTest, TiedWeightsCannotLieDifferently) {
  testing::run_ranks(2, [](std::shared_ptr<comm::World> world) {
    LabSetup setup(std::move(world), {{"tp", 2}});
    ShardingPlan plan = test::lab_tensor_parallel();
    plan.parameter(
            "head.weight", {{"tp", Placement::shard(0)}}
    ).parameter("embed.weight", {{"tp", Placement::replicate()}});
    HS_EXPECT_HAS(thrown_by([&] { setup.apply(plan); }), "one tied weight");
  });
}

struct Case {
  const char* name;
  std::vector<layout::MeshAxis> axes;
  ShardingPlan (*plan)();
  testing::RankBackend backend = testing::RankBackend::kLocal;
};

class LabEquivalenceTest : public ::testing::TestWithParam<Case> {};

TEST_P(LabEquivalenceTest, GradientsEqualTheUnshardedStepAndValidationPasses) {
  const Case& param = GetParam();
  int size = 1;
  for (const auto& axis : param.axes) {
    size *= axis.size;
  }
  testing::run_ranks(
      size,
      [&](std::shared_ptr<comm::World> world) {
        LabSetup setup(std::move(world), param.axes);
        const auto applied = setup.apply(param.plan());
        double scale = 1;
        {
          ValidationGuard guard(*setup.lab, applied);
          setup.lab->forward(setup.tokens).backward();
          guard.finish();
        }
        if (setup.has_dp()) {
          scale = 1.0 / setup.mesh->mesh().axis_size("dp");
          for (const auto& item : setup.lab->named_parameters()) {
            if (item.value().grad().defined() && item.key() != "head.weight") {  // tied
              setup.mesh->axis("dp")->all_reduce(item.value().grad())->wait();
            }
          }
        }
        test::Lab reference(std::make_shared<test::LabSwitches>());
        reference->forward(test::lab_tokens()).backward();
        const auto report = gradient_equivalence(applied, named_gradients(*reference), scale);
        EXPECT_TRUE(report.passed) << to_text(report);
        EXPECT_GE(report.rows.size(), 12U);
      },
      {.backend = param.backend}
  );
}

INSTANTIATE_TEST_SUITE_P(
    Plans,
    LabEquivalenceTest,
    ::testing::Values(
        Case{"tp2", {{"tp", 2}}, test::lab_tensor_parallel},
        Case{"tp4", {{"tp", 4}}, test::lab_tensor_parallel},
        Case{"sp2", {{"tp", 2}}, test::lab_sequence_parallel},
        Case{"dp2_tp2", {{"dp", 2}, {"tp", 2}}, test::lab_tensor_parallel},
        Case{"dp2_sp2", {{"dp", 2}, {"tp", 2}}, test::lab_sequence_parallel},
        Case{"sp2_processes", {{"tp", 2}}, test::lab_sequence_parallel, testing::RankBackend::kShm},
        Case{"tp2_gloo", {{"tp", 2}}, test::lab_tensor_parallel, testing::RankBackend::kGloo}
    ),
    [](const auto& each) { return std::string(each.param.name); }
);

}  // namespace
}  // namespace hypershard::plan
