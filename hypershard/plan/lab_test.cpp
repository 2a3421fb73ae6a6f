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
    const std::string text = thrown_by([&] { setup.apply(plan); });
    HS_EXPECT_HAS(text, "parameter 'embed.weight' is shard(0) on axis 'tp'");
    HS_EXPECT_HAS(text, "(as 'head.weight') and replicate by rule");
    HS_EXPECT_HAS(text, "the two names are one tied weight, which has one layout");
  });
}

TEST(LabPlanTest, PositionsCountedFromEachRanksFirstAreFound) {
  testing::run_ranks(2, [](std::shared_ptr<comm::World> world) {
    LabSetup setup(std::move(world), {{"tp", 2}});
    setup.switches->mistake = "local_positions";
    const std::string text = thrown_by([&] { setup.apply(test::lab_sequence_parallel()); });
    HS_EXPECT_HAS(text, "aten::arange in layer: ");
    HS_EXPECT_HAS(text, "is globally [1], but the unsharded model computes [2] here");
    // Whole positions may be counted so.
    LabSetup whole(setup.mesh->world().shared_from_this(), {{"tp", 2}});
    whole.switches->mistake = "local_positions";
    EXPECT_EQ(thrown_by([&] { (void)whole.apply(test::lab_tensor_parallel()); }), "");
  });
}

TEST(LabPlanTest, AccumulationEvaluationAndFrozenParametersPass) {
  testing::run_ranks(2, [](std::shared_ptr<comm::World> world) {
    LabSetup setup(std::move(world), {{"tp", 2}});
    setup.lab->layer->norm1->weight.set_requires_grad(false);
    setup.lab->layer->mlp->up->weight.set_requires_grad(false);
    const auto applied = setup.apply(test::lab_sequence_parallel());
    EXPECT_TRUE(applied.resolved().find_parameter("layer.norm1.weight")->reduce_axes.empty());
    ValidationGuard guard(*setup.lab, applied);
    for (int step = 0; step < 2; ++step) {
      const at::Tensor first = setup.lab->forward(setup.tokens);
      const at::Tensor second = setup.lab->forward(setup.tokens);
      (first + second).backward();
      {
        const at::NoGradGuard no_grad;
        EXPECT_EQ(setup.lab->forward(setup.tokens).item<double>(), first.item<double>());
      }
      setup.lab->zero_grad();
    }
    guard.finish();
    EXPECT_EQ(guard.counts().forwards, 6);
    EXPECT_EQ(guard.counts().backwards, 2);
  });
}

TEST(LabPlanTest, ARankThatRefusesAloneTellsTheOthers) {
  testing::run_ranks(2, [](std::shared_ptr<comm::World> world) {
    LabSetup setup(std::move(world), {{"tp", 2}});
    const auto applied = setup.apply(test::lab_tensor_parallel());
    if (setup.mesh->rank() == 1) {
      setup.switches->mistake = "gelu_before_reduction";
    }
    ValidationGuard guard(*setup.lab, applied);
    const std::string text = thrown_by([&] { setup.lab->forward(setup.tokens); });
    HS_EXPECT_HAS(text, "aten::gelu in layer.mlp");
    if (setup.mesh->rank() == 0) {
      HS_EXPECT_HAS(text, "rank 1");
      HS_EXPECT_HAS(text, "it refused");
    }
  });
}

// What a rank does when its own code throws, as a training loop would.
std::string run_telling(LabSetup& setup, ValidationGuard& guard) {
  try {
    setup.lab->forward(setup.tokens).backward();
    guard.finish();
  } catch (const PeerFailure& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    EXPECT_FALSE(guard.tell_failure(error.code(), "told before"));
    return error.what();
  } catch (const IoError& error) {
    EXPECT_TRUE(guard.tell_failure(error.code(), error.what_brief()));
    EXPECT_FALSE(guard.tell_failure(error.code(), "told before"));
    return error.what();
  }
  return "";
}

TEST(LabPlanTest, ARankThatFailsAloneTellsTheOthers) {
  enum class Where { kInput, kForward, kBackward };
  for (const Where where : {Where::kInput, Where::kForward, Where::kBackward}) {
    testing::run_ranks(2, [&](std::shared_ptr<comm::World> world) {
      LabSetup setup(std::move(world), {{"tp", 2}});
      const auto applied = setup.apply(test::lab_tensor_parallel());
      struct Fails final : nn::ForwardHooks {
        Where where;
        explicit Fails(Where at_in) : where(at_in) {}
        static void fail() { HS_FAIL(IoError, "a file is gone"); }
        void pre_forward(std::span<at::Tensor* const>) override {
          if (where == Where::kForward) {
            fail();
          }
        }
        void post_forward(std::span<at::Tensor* const> outputs) override {
          if (where == Where::kBackward) {
            outputs[0]->register_hook([](const at::Tensor&) { fail(); });
          }
        }
      };
      const auto hooks = std::make_shared<Fails>(where);
      std::string text;
      {
        ValidationGuard guard(*setup.lab, applied);
        if (setup.mesh->rank() == 1 && where == Where::kInput) {
          EXPECT_TRUE(guard.tell_failure(ErrorCode::kIo, "a file is gone"));
          return;
        }
        if (setup.mesh->rank() == 1) {
          setup.lab->layer->norm2->add_forward_hooks(hooks);
        }
        text = run_telling(setup, guard);
      }
      HS_EXPECT_HAS(text, "a file is gone");
      if (setup.mesh->rank() == 0) {
        HS_EXPECT_HAS(text, "rank 1 failed in a validated program");
      }
    });
  }
}

struct Case {
  const char* name;
  std::vector<layout::MeshAxis> axes;
  ShardingPlan (*plan)();
  bool recompute = false;
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
        setup.switches->recompute = param.recompute;
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
        Case{"tp2_recompute", {{"tp", 2}}, test::lab_tensor_parallel, true},
        Case{"sp2_recompute", {{"tp", 2}}, test::lab_sequence_parallel, true},
        Case{
            "sp2_processes",
            {{"tp", 2}},
            test::lab_sequence_parallel,
            false,
            testing::RankBackend::kShm
        },
        Case{"tp2_gloo", {{"tp", 2}}, test::lab_tensor_parallel, false, testing::RankBackend::kGloo}
    ),
    [](const auto& each) { return std::string(each.param.name); }
);

}  // namespace
}  // namespace hypershard::plan
