// Seeded mistakes: each trains wrong in production and is caught in validation, on all ranks, at
// the right place, with the way out.
#include <gtest/gtest.h>

#include "hypershard/plan/layout_error.h"
#include "hypershard/plan/test_mistakes.h"

namespace hypershard::plan {
namespace {

using layout::Layout;
using layout::Placement;
using test::LabRun;
using test::Mistake;
using test::mistakes;
using test::over_ranks;

class PlanMistakeTest : public ::testing::TestWithParam<Mistake> {
 protected:
  static LabRun prepare(const Mistake& mistake, std::shared_ptr<comm::World> world) {
    LabRun run;
    std::vector<layout::MeshAxis> axes{{"tp", 2}};
    if (mistake.has_dp) {
      axes.insert(axes.begin(), {"dp", 2});
    }
    run.mesh = test::make_mesh(std::move(world), axes);
    run.switches->rank = run.mesh->rank();
    run.switches->mesh = run.mesh;
    run.switches->with_dropout = mistake.with_dropout;
    run.reference = test::Lab(std::make_shared<test::LabSwitches>());
    run.lab = test::Lab(run.switches);
    const at::Tensor whole = run.tokens;
    Layout layout = layout::replicated_layout(run.mesh->mesh());
    if (mistake.has_dp) {
      layout.placements[0] = Placement::shard(0);
    }
    run.tokens = test::part_of(whole, layout, *run.mesh);
    ShardingPlan plan = mistake.plan();
    if (mistake.edit != nullptr) {
      plan = mistake.edit(plan);
    }
    ResolveOptions options{.on_problem = OnProblem::kCollect};
    if (mistake.has_dp) {
      options.data_axes = {"dp"};
    }
    ResolvedPlan resolved = resolve(
        *run.lab,
        plan,
        run.mesh->mesh(),
        run.mesh->rank(),
        {{run.tokens, {whole.sizes().vec(), layout}, "tokens"}},
        [&] { return std::vector<at::Tensor>{run.lab->forward(run.tokens)}; },
        options
    );
    EXPECT_TRUE(resolved.is_complete);
    EXPECT_EQ(resolved.problems.empty(), mistake.edit == nullptr)
        << to_text(resolved, run.mesh->mesh());
    if (mistake.spoil_resolved != nullptr) {
      mistake.spoil_resolved(resolved);
    }
    run.applied = apply_plan(
        *run.lab,
        std::move(resolved),
        run.mesh,
        {.reduce_gradients = mistake.reduce_gradients, .allow_problems = true}
    );
    return run;
  }

  static void turn_on(const Mistake& mistake, LabRun& run) {
    if (mistake.is_switch) {
      run.switches->mistake = mistake.name;
    }
    if (mistake.spoil != nullptr) {
      mistake.spoil(run);
    }
  }

  // The same program without the mistake equals the reference, so that it is the mistake that
  // shows.
  static bool gradients_differ(LabRun& run) {
    run.step();
    if (run.mesh->mesh().has_axis("dp")) {
      for (const auto& item : run.lab->named_parameters()) {
        if (item.value().grad().defined() && item.key() != "head.weight") {  // tied
          run.mesh->axis("dp")->all_reduce(item.value().grad())->wait();
        }
      }
    }
    run.reference->zero_grad();
    run.reference->forward(test::lab_tokens()).backward();
    const auto report =
        gradient_equivalence(*run.applied, named_gradients(*run.reference), 1 / run.dp());
    const auto failed = over_ranks(run, report.passed ? 0 : 1);
    return std::any_of(failed.begin(), failed.end(), [](double flag) { return flag != 0; });
  }
};

TEST_P(PlanMistakeTest, TrainsWrongInProductionAndIsCaughtInValidation) {
  const Mistake& mistake = GetParam();
  testing::run_ranks(mistake.has_dp ? 4 : 2, [&](std::shared_ptr<comm::World> world) {
    LabRun run = prepare(mistake, std::move(world));
    const bool is_right_before = mistake.edit == nullptr && mistake.spoil_resolved == nullptr &&
                                 mistake.reduce_gradients && !mistake.with_dropout;
    if (is_right_before) {
      EXPECT_FALSE(gradients_differ(run));
    }
    turn_on(mistake, run);
    EXPECT_TRUE(mistake.went_wrong != nullptr ? mistake.went_wrong(run) : gradients_differ(run))
        << "production trains right";
    try {
      ValidationGuard guard(*run.lab, *run.applied);
      run.step();
      guard.finish();
      ADD_FAILURE() << "validation let it pass on rank " << run.mesh->rank();
    } catch (const LayoutError& error) {
      HS_EXPECT_HAS(error.what(), mistake.place);
      HS_EXPECT_HAS(error.what(), mistake.what);
      HS_EXPECT_HAS(error.what(), mistake.fix);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    All,
    PlanMistakeTest,
    ::testing::ValuesIn(mistakes()),
    [](const auto& each) { return std::string(each.param.name); }
);

TEST(PlanMistakeCountTest, ThereAreAtLeastTwentyFive) {
  EXPECT_GE(mistakes().size(), 25U);
}

// The right plans of the lab, with dropout seeded as it should be.
class RightPlanTest : public ::testing::TestWithParam<std::tuple<bool, bool, bool>> {};

TEST_P(RightPlanTest, IsNotRefused) {
  const auto [sequence_parallel, has_dp, with_dropout] = GetParam();
  testing::run_ranks(has_dp ? 4 : 2, [&](std::shared_ptr<comm::World> world) {
    std::vector<layout::MeshAxis> axes{{"tp", 2}};
    if (has_dp) {
      axes.insert(axes.begin(), {"dp", 2});
    }
    const auto mesh = test::make_mesh(std::move(world), axes);
    const auto switches = std::make_shared<test::LabSwitches>();
    switches->with_dropout = with_dropout;
    // One seed for each part of the activations that are dropped.
    const int dp = has_dp ? mesh->mesh().coordinate(mesh->rank(), "dp") : 0;
    const int tp = sequence_parallel ? mesh->mesh().coordinate(mesh->rank(), "tp") : 0;
    switches->dropout.set_current_seed(static_cast<std::uint64_t>(100 + 10 * dp + tp));
    test::Lab lab(switches);
    Layout layout = layout::replicated_layout(mesh->mesh());
    if (has_dp) {
      layout.placements[0] = Placement::shard(0);
    }
    const at::Tensor tokens = test::part_of(test::lab_tokens(), layout, *mesh);
    ResolveOptions options;
    if (has_dp) {
      options.data_axes = {"dp"};
    }
    const auto applied = apply_plan(
        *lab,
        sequence_parallel ? test::lab_sequence_parallel() : test::lab_tensor_parallel(),
        mesh,
        {{tokens, {test::lab_tokens().sizes().vec(), layout}, "tokens"}},
        [&] { return std::vector<at::Tensor>{lab->forward(tokens)}; },
        options
    );
    EXPECT_EQ(
        applied.resolved().find_parameter("layer.norm1.weight")->reduce_axes.size(),
        sequence_parallel ? 1U : 0U
    );
    ValidationGuard guard(*lab, applied);
    for (int step = 0; step < 3; ++step) {
      lab->forward(tokens).backward();
    }
    guard.finish();
    EXPECT_EQ(guard.counts().backwards, 3);
  });
}

INSTANTIATE_TEST_SUITE_P(
    All, RightPlanTest, ::testing::Combine(::testing::Bool(), ::testing::Bool(), ::testing::Bool())
);

}  // namespace
}  // namespace hypershard::plan
