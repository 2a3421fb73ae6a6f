// Boundaries and gradients that one run finds.
#include "hypershard/plan/resolve.h"

#include <chrono>
#include <cstdio>

#include <gtest/gtest.h>

#include "hypershard/core/error.h"
#include "hypershard/plan/test_models.h"

namespace hypershard::plan {
namespace {

using layout::Layout;
using layout::Placement;
using test::thrown_by;

const Placement kRep = Placement::replicate();
const Placement kSum = Placement::partial();

ShardingPlan column_and_row() {
  ShardingPlan plan;
  plan.parameter(
          "blocks.*.mlp.up.*", {{"tp", Placement::shard(0)}}
  ).parameter("blocks.*.mlp.down.weight", {{"tp", Placement::shard(1)}});
  return plan;
}

// Blocks on a mesh {dp: 2, tp: 2}, rank 0, batch cut over dp.
class ResolveTest : public ::testing::Test {
 protected:
  ResolvedPlan run(const ShardingPlan& plan, ResolveOptions options = {.data_axes = {"dp"}}) {
    const auto x = at::ones({4, 8}, at::kDouble);
    const PlannedInput input{x, {{8, 8}, Layout{{Placement::shard(0), kRep}}}, "x"};
    return resolve(
        *net_,
        plan,
        mesh_,
        0,
        {input},
        [&] { return std::vector<at::Tensor>{net_->forward(x).pow(2).mean()}; },
        options
    );
  }
  std::string refusal(const ShardingPlan& plan) {
    return thrown_by([&] { run(plan); });
  }
  layout::DeviceMesh mesh_ = test::planned_mesh({{"dp", 2}, {"tp", 2}});
  test::Net net_{8, 12};
};

TEST_F(ResolveTest, TensorParallelBoundariesAreInferred) {
  const ResolvedPlan plan = run(test::tensor_parallel_plan());
  ASSERT_EQ(plan.boundaries.size(), 4U);
  const ResolvedBoundary& in = plan.boundaries[0];
  EXPECT_EQ(in.shape, (std::vector<std::int64_t>{8, 8}));
  EXPECT_TRUE(in.forward.steps.empty());
  ASSERT_TRUE(in.backward.has_value());
  EXPECT_EQ(in.backward->arriving.placements[1], kSum);
  EXPECT_EQ(in.backward->leaving.placements[1], kRep);
  EXPECT_EQ(in.backward->leaving.placements[0], Placement::shard(0));
  ASSERT_EQ(in.backward->steps.size(), 1U);
  EXPECT_EQ(in.backward->steps[0].kind, layout::RedistributionStep::Kind::kAllReduce);
  const ResolvedBoundary& out = plan.boundaries[1];
  EXPECT_EQ(out.forward.arriving.placements[1], kSum);
  ASSERT_EQ(out.forward.steps.size(), 1U);
  EXPECT_EQ(out.forward.sent_bytes, 4 * 8 * 8);  // 2 (n - 1) / n of the local tensor
  EXPECT_TRUE(out.backward->steps.empty());
  EXPECT_EQ(plan.outputs[0].layout.placements[0].kind, Placement::Kind::kPartial);
}

TEST_F(ResolveTest, ParameterGradientsFollowTheLaw) {
  const ResolvedPlan plan = run(test::tensor_parallel_plan());
  for (const ResolvedParameter& parameter : plan.parameters) {
    EXPECT_TRUE(parameter.reduce_axes.empty()) << parameter.name;
    EXPECT_EQ(parameter.data_axes, std::vector<std::string>{"dp"}) << parameter.name;
    ASSERT_TRUE(parameter.gradient.has_value()) << parameter.name;
    EXPECT_EQ(parameter.gradient->placements[1], parameter.spec.layout.placements[1]);
  }
  EXPECT_EQ(net_->blocks[0]->as<test::BlockImpl>()->mlp->up->weight.size(0), 12);
  EXPECT_NE(net_->blocks[0]->as<test::BlockImpl>()->mlp->up->weight.sum().item<double>(), 0.0);
}

TEST_F(ResolveTest, SequenceParallelNormsHavePartialGradients) {
  // Rows stand for positions here: cut over tp between the MLPs.
  ShardingPlan plan = column_and_row();
  plan.input("blocks.0", {{"tp", Placement::shard(0)}})
      .input("blocks.*.mlp", {{"tp", kRep}})
      .output("blocks.*.mlp", {{"tp", Placement::shard(0)}})
      .input("head", {{"tp", kRep}});
  const ResolvedPlan resolved = run(plan);
  EXPECT_EQ(
      resolved.find_parameter("blocks.1.norm.weight")->reduce_axes, std::vector<std::string>{"tp"}
  );
  EXPECT_TRUE(resolved.find_parameter("head.weight")->reduce_axes.empty());
  const std::string report = to_text(resolved, mesh_);
  HS_EXPECT_HAS(report, "blocks.1.norm.weight [8]  {dp: Replicate, tp: Replicate}");
  HS_EXPECT_HAS(report, "gradient all-reduced over [tp]");
  HS_EXPECT_HAS(report, "output 0 of blocks.1.mlp  Double [8, 8]");
  HS_EXPECT_HAS(report, "reduce_scatter over tp");
}

TEST_F(ResolveTest, EightyLayersOnAThousandRanksTakeSeconds) {
  test::model_options() = test::model_options().device(at::kMeta);
  test::Net deep(512, 2048, /*num_blocks=*/80);
  const auto x = at::ones({16, 512}, test::model_options());
  test::model_options() = test::model_options().device(at::kCPU);
  const auto mesh = test::planned_mesh({{"replicate", 8}, {"shard", 16}, {"ep", 2}, {"tp", 4}});
  const Layout layout{{Placement::shard(0), Placement::shard(0), kRep, kRep}};
  const auto begin = std::chrono::steady_clock::now();
  const ResolvedPlan plan = resolve(
      *deep,
      test::tensor_parallel_plan(),
      mesh,
      777,
      {{x, even_spec(x, layout, mesh), "x"}},
      [&] { return std::vector<at::Tensor>{deep->forward(x).pow(2).mean()}; },
      {.data_axes = {"replicate", "shard"}}
  );
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  EXPECT_EQ(plan.boundaries.size(), 160U);
  EXPECT_EQ(plan.boundaries[1].shape, (std::vector<std::int64_t>{2048, 512}));
  RecordProperty("seconds", std::to_string(seconds.count()));
  std::printf("[ resolve  ] %.3f s\n", seconds.count());
  EXPECT_LT(seconds.count(), 10.0);  // a tenth of a second on a quiet core
}

TEST_F(ResolveTest, MissingReductionIsRefusedAtItsOperator) {
  ShardingPlan plan = column_and_row();
  plan.input("blocks.*.mlp", {{"tp", kRep}});
  HS_EXPECT_HAS(refusal(plan), "aten::add.Tensor in blocks.0");
}

TEST_F(ResolveTest, MissingInputBoundaryIsAGradientConflict) {
  ShardingPlan plan = column_and_row();
  plan.output("blocks.*.mlp", {{"tp", kRep}});
  const std::string text = refusal(plan);
  HS_EXPECT_HAS(text, "on axis 'tp' it is Partial from");
  HS_EXPECT_HAS(text, "a boundary is missing");
}

TEST_F(ResolveTest, ProblemsAreCollectedWhenAskedFor) {
  ShardingPlan plan = column_and_row();
  plan.input("blocks.*.mlp", {{"tp", kRep}});
  const ResolvedPlan resolved = run(plan, {.data_axes = {"dp"}, .on_problem = OnProblem::kCollect});
  ASSERT_GE(resolved.problems.size(), 2U);
  EXPECT_TRUE(resolved.is_complete);
  EXPECT_EQ(resolved.problems[0].module, "blocks.0");
  EXPECT_EQ(resolved.problems[0].subject, "aten::add.Tensor");
  EXPECT_EQ(resolved.problems[1].module, "blocks.1");
  HS_EXPECT_HAS(to_text(resolved, mesh_), "problems\n");
}

TEST_F(ResolveTest, CollectingEndsWhereTheModelCannotRunOn) {
  ShardingPlan plan;
  plan.parameter("blocks.*.mlp.down.weight", {{"tp", Placement::shard(1)}});
  const ResolvedPlan resolved = run(plan, {.data_axes = {"dp"}, .on_problem = OnProblem::kCollect});
  EXPECT_FALSE(resolved.is_complete);
  ASSERT_EQ(resolved.problems.size(), 1U);
  EXPECT_EQ(resolved.problems[0].module, "blocks.0.mlp.down");
  EXPECT_EQ(resolved.problems[0].subject, "aten::linear");
}

TEST_F(ResolveTest, CollectingKeepsTheProblemThatTheLibraryItselfCannotPass) {
  ShardingPlan plan;
  plan.output("blocks.0", {{"tp", Placement::shard(5)}});
  const ResolvedPlan resolved = run(plan, {.data_axes = {"dp"}, .on_problem = OnProblem::kCollect});
  EXPECT_FALSE(resolved.is_complete);
  ASSERT_EQ(resolved.problems.size(), 1U);
  HS_EXPECT_HAS(resolved.problems[0].what, "a layout that the tensor cannot have");
}

TEST_F(ResolveTest, AMaximumOverADataAxisIsNotDifferentiatedRankByRank) {
  const auto x = at::ones({4, 8}, at::kDouble);
  const PlannedInput input{x, {{8, 8}, Layout{{Placement::shard(0), kRep}}}, "x"};
  const std::string text = thrown_by([&] {
    resolve(
        *net_,
        test::tensor_parallel_plan(),
        mesh_,
        0,
        {input},
        [&] { return std::vector<at::Tensor>{net_->forward(x).amax()}; },
        {.data_axes = {"dp"}}
    );
  });
  HS_EXPECT_HAS(text, "it is Partial(max) on axis 'dp'");
  HS_EXPECT_HAS(text, "a sum or a mean over the data axes");
}

TEST_F(ResolveTest, AMeanOverACutAxisMustBeMadeWholeOrBeDataParallel) {
  HS_EXPECT_HAS(
      thrown_by([&] { run(test::tensor_parallel_plan(), {}); }),
      "would take each rank's term for the whole and give gradients 2 times too large"
  );
}

TEST_F(ResolveTest, BoundaryThatATensorCannotHaveNamesTheRule) {
  ShardingPlan plan;
  plan.output("blocks.0", {{"tp", Placement::shard(5)}});
  const std::string text = refusal(plan);
  HS_EXPECT_HAS(text, "output 0 of blocks.0");
  HS_EXPECT_HAS(text, "correct the rule");
  ShardingPlan index;
  index.output("blocks.0", {{"tp", kRep}}, 3);
  HS_EXPECT_HAS(refusal(index), "output 3 of blocks.0: the module has 1 tensor there");
}

TEST_F(ResolveTest, ATensorFromNothingOfACutSizeIsTold) {
  const auto x = at::ones({4, 8}, at::kDouble);
  const auto resolve_with = [&](const std::function<at::Tensor(const at::Tensor&)>& start) {
    return test::thrown_by([&] {
      resolve(
          *net_,
          test::tensor_parallel_plan(),
          mesh_,
          0,
          {{x, {{8, 8}, Layout{{Placement::shard(0), kRep}}}, "x"}},
          [&] {
            const at::Tensor y = net_->forward(x);
            return std::vector<at::Tensor>{(y + start(y)).pow(2).mean()};
          },
          {.data_axes = {"dp"}}
      );
    });
  };
  HS_EXPECT_HAS(
      resolve_with([](const at::Tensor& y) { return at::zeros({y.size(0), 3}, at::kDouble); }),
      "make it from the tensor that is cut (zeros_like"
  );
  EXPECT_EQ(resolve_with([](const at::Tensor& y) { return at::zeros_like(y); }), "");
}

TEST_F(ResolveTest, RulesOnAxesThatAreNotTheirsAreNamed) {
  ShardingPlan data;
  data.parameter("blocks.1.mlp.up.weight", {{"dp", Placement::shard(0)}});
  HS_EXPECT_HAS(
      refusal(data), "parameter 'blocks.1.mlp.up.weight' is Shard(0) on the data axis 'dp'"
  );
  ShardingPlan unknown;
  unknown.input("head", {{"tpp", kRep}});
  HS_EXPECT_HAS(
      refusal(unknown), "input 0 of 'head': {tpp = \"replicate\"}: there is no mesh axis"
  );
  HS_EXPECT_HAS(refusal(unknown), "did you mean 'tp'");
}

// A check in the model's code refuses what no operator saw.
TEST_F(ResolveTest, AModelThatFailsWithItsPartsOnlyIsAFinding) {
  struct StrictImpl : nn::Hookable<StrictImpl, at::Tensor(const at::Tensor&), torch::nn::Module> {
    StrictImpl() : gate(8, 12), up(8, 12) {
      register_module("gate", gate);
      register_module("up", up);
    }
    at::Tensor forward_impl(const at::Tensor& x) {
      const auto a = gate->forward(x);
      const auto b = up->forward(x);
      HS_CHECK(a.sizes() == b.sizes(), "strict: ", a.sizes(), " is not ", b.sizes());
      return a * b;
    }
    test::Dense gate;
    test::Dense up;
  };
  const auto model = std::make_shared<StrictImpl>();
  const auto x = at::ones({4, 8}, at::kDouble);
  ShardingPlan plan;
  plan.parameter("gate.*", {{"tp", Placement::shard(0)}});
  const auto resolve_it = [&](const ResolveOptions& options) {
    return resolve(
        *model,
        plan,
        mesh_,
        0,
        {{x, {{8, 8}, Layout{{Placement::shard(0), kRep}}}, "x"}},
        [&] { return std::vector<at::Tensor>{model->forward(x).pow(2).mean()}; },
        options
    );
  };
  try {
    resolve_it({.data_axes = {"dp"}});
    FAIL() << "half a gate was accepted";
  } catch (const LayoutError& error) {
    const std::string text = error.what();
    HS_EXPECT_HAS(text, "(root): the unsharded model runs, but with this rank's parts it fails");
    HS_EXPECT_HAS(text, "strict: [4, 6] is not [4, 12]");
    HS_EXPECT_HAS(text, "gate.weight is {dp: Replicate, tp: Shard(0)} of [12, 8]");
    HS_EXPECT_HAS(text, "up.weight is {dp: Replicate, tp: Replicate} of [12, 8]");
  }
  const auto collected = resolve_it({.data_axes = {"dp"}, .on_problem = OnProblem::kCollect});
  EXPECT_EQ(collected.problems.size(), 1U);
  EXPECT_FALSE(collected.is_complete);
}

TEST_F(ResolveTest, MetaModelsResolveAlikeAndKeepTheirShapes) {
  const std::string real = to_text(run(test::tensor_parallel_plan()), mesh_);
  test::model_options() = test::model_options().device(at::kMeta);
  net_ = test::Net(8, 12);
  const auto x = at::ones({4, 8}, test::model_options());
  test::model_options() = test::model_options().device(at::kCPU);
  const PlannedInput input{x, {{8, 8}, Layout{{Placement::shard(0), kRep}}}, "x"};
  const ResolvedPlan meta = resolve(
      *net_,
      test::tensor_parallel_plan(),
      mesh_,
      0,
      {input},
      [&] { return std::vector<at::Tensor>{net_->forward(x).pow(2).mean()}; },
      {.data_axes = {"dp"}}
  );
  EXPECT_EQ(to_text(meta, mesh_), real);
  EXPECT_TRUE(net_->head->weight.is_meta());
  EXPECT_EQ(net_->blocks[0]->as<test::BlockImpl>()->mlp->up->weight.size(0), 12);
}

}  // namespace
}  // namespace hypershard::plan
