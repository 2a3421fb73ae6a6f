// Text forms, checks without a model, and the match with one.
#include "hypershard/plan/sharding_plan.h"

#include <gtest/gtest.h>

#include "hypershard/core/text.h"
#include "hypershard/plan/match.h"
#include "hypershard/plan/test_models.h"

namespace hypershard::plan {
namespace {

using layout::Placement;
using test::thrown_by;

TEST(ShardingPlanTest, PlacementWordsAreReadAsWritten) {
  for (const char* word :
       {"replicate",
        "shard(0)",
        "shard(12)",
        "partial",
        "partial(avg)",
        "partial(max)",
        "partial(min)"}) {
    EXPECT_EQ(placement_word(parse_placement(word)), word);
  }
  EXPECT_EQ(parse_placement("partial(sum)"), Placement::partial());
}

TEST(ShardingPlanTest, WrongPlacementWordsAreRefusedWithTheForms) {
  for (const char* word :
       {"",
        "shrad(0)",
        "shard",
        "shard()",
        "shard(-1)",
        "shard(x)",
        "shard(0",
        "partial(mean)",
        "Replicate",
        "flat"}) {
    const std::string text = thrown_by([&] { parse_placement(word); });
    HS_EXPECT_HAS(text, concat_text("placement '", word, "'"));
    HS_EXPECT_HAS(text, "expected one of replicate, shard(DIM)");
  }
}

TEST(ShardingPlanTest, RulesAreCheckedWhenAdded) {
  ShardingPlan plan;
  const auto refused = [&](const std::function<void()>& add, const std::string& fragment) {
    HS_EXPECT_HAS(thrown_by(add), fragment);
  };
  refused(
      [&] { plan.parameter("a", {{"tp", Placement::partial()}}); }, "a parameter has one value"
  );
  refused([&] { plan.parameter("a", {{"tp", Placement::flat()}}); }, "belongs to the data axes");
  refused([&] { plan.parameter("a", {{"tp", Placement::shard(-1)}}); }, "shards dimension -1");
  refused([&] { plan.input("a", {}); }, "states no axis");
  refused([&] { plan.output("a", {{"tp", {}}}, -2); }, "tensor index -2 is negative");
  refused([&] { plan.output("a", {{"tp", {}}, {"tp", {}}}); }, "states axis 'tp' twice");
  refused(
      [&] { plan.output("a[", {{"tp", {}}}); },
      "output 0 of 'a[': {tp = \"replicate\"}: glob: pattern 'a['"
  );
  refused([&] { plan.parameter("", {{"tp", {}}}); }, "the pattern is empty");
  EXPECT_TRUE(plan.empty());
}

class PlanMatchTest : public ::testing::Test {
 protected:
  std::string refusal(const ShardingPlan& plan) {
    return thrown_by([&] { match_plan(plan, *net_, mesh_); });
  }
  test::Net net_{8, 12};
  layout::DeviceMesh mesh_ = test::planned_mesh({{"dp", 2}, {"tp", 2}});
};

TEST_F(PlanMatchTest, GivesEveryParameterALayoutAndListsBoundaries) {
  const MatchedPlan matched = match_plan(test::tensor_parallel_plan(), *net_, mesh_);
  EXPECT_EQ(matched.parameters.size(), 2 * 4 + 2);
  for (const MatchedParameter& parameter : matched.parameters) {
    const bool is_up = parameter.name.find(".up.") != std::string::npos;
    const bool is_down = parameter.name.find(".down.") != std::string::npos;
    const Placement expected = is_up     ? Placement::shard(0)
                               : is_down ? Placement::shard(1)
                                         : Placement::replicate();
    EXPECT_EQ(parameter.spec.layout.placements[0], Placement::replicate());
    EXPECT_EQ(parameter.spec.layout.placements[1], expected) << parameter.name;
  }
  ASSERT_EQ(matched.sites.size(), 4U);
  EXPECT_EQ(to_text(matched.sites[0]), "input 0 of blocks.0.mlp");
  EXPECT_EQ(to_text(matched.sites[3]), "output 0 of blocks.1.mlp");
  EXPECT_FALSE(matched.sites[0].wanted[0].has_value());
  EXPECT_EQ(matched.sites[0].wanted[1], Placement::replicate());
}

TEST_F(PlanMatchTest, TheRootIsTheEmptyPathAndPartOfAll) {
  ShardingPlan plan;
  plan.input("", {{"tp", Placement::shard(0)}});
  const MatchedPlan matched = match_plan(plan, *net_, mesh_);
  ASSERT_EQ(matched.sites.size(), 1U);
  EXPECT_EQ(to_text(matched.sites[0]), "input 0 of (root)");
  plan.input("**", {{"tp", Placement::replicate()}});
  HS_EXPECT_HAS(refusal(plan), "input 0 of the root is shard(0) on axis 'tp' by rule");
}

TEST_F(PlanMatchTest, PatternWithoutMatchNamesTheNearest) {
  ShardingPlan plan;
  plan.parameter("blocks.0.mlp.upp.weight", {{"tp", Placement::shard(0)}});
  HS_EXPECT_HAS(refusal(plan), "matches no parameter; the model has 10");
  HS_EXPECT_HAS(refusal(plan), "did you mean 'blocks.0.mlp.up.weight'");
  ShardingPlan modules;
  modules.input("heads", {{"tp", Placement::replicate()}});
  HS_EXPECT_HAS(refusal(modules), "matches no module");
  HS_EXPECT_HAS(refusal(modules), "did you mean 'head'");
}

TEST_F(PlanMatchTest, ConflictNamesBothRules) {
  ShardingPlan plan;
  plan.parameter(
          "**.up.weight", {{"tp", Placement::shard(0)}}
  ).parameter("blocks.1.**", {{"tp", Placement::shard(1)}});
  const std::string text = refusal(plan);
  HS_EXPECT_HAS(text, "parameter 'blocks.1.mlp.up.weight' is shard(0) on axis 'tp' by rule");
  HS_EXPECT_HAS(text, "'**.up.weight'");
  HS_EXPECT_HAS(text, "'blocks.1.**'");
  ShardingPlan boundary;
  boundary.output(
              "blocks.*", {{"tp", Placement::replicate()}}
  ).output("blocks.1", {{"tp", Placement::shard(1)}});
  HS_EXPECT_HAS(refusal(boundary), "output 0 of 'blocks.1' is replicate on axis 'tp' by rule");
}

TEST_F(PlanMatchTest, RulesThatAgreeOrSpeakOfOtherAxesAddUp) {
  ShardingPlan plan;
  plan.output("blocks.*", {{"tp", Placement::replicate()}})
      .output("blocks.1", {{"tp", Placement::replicate()}})
      .output("blocks.1", {{"dp", Placement::shard(0)}});
  const MatchedPlan matched = match_plan(plan, *net_, mesh_);
  ASSERT_EQ(matched.sites.size(), 2U);
  EXPECT_EQ(matched.sites[1].wanted[0], Placement::shard(0));
  EXPECT_EQ(matched.sites[1].wanted[1], Placement::replicate());
}

TEST_F(PlanMatchTest, UnknownAxisAndMissingDimensionAreNamed) {
  ShardingPlan axis;
  axis.parameter("head.bias", {{"pt", Placement::shard(0)}});
  HS_EXPECT_HAS(refusal(axis), "did you mean 'tp'");
  ShardingPlan dim;
  dim.parameter("head.bias", {{"tp", Placement::shard(1)}});
  HS_EXPECT_HAS(refusal(dim), "'head.bias' of shape [3] has no dimension 1");
}

TEST_F(PlanMatchTest, ModuleWithoutHooksCannotBeABoundary) {
  ShardingPlan plan;
  plan.input("blocks", {{"tp", Placement::replicate()}});
  HS_EXPECT_HAS(refusal(plan), "matches module 'blocks' of type");
  HS_EXPECT_HAS(refusal(plan), "has no forward hooks");
}

struct TiedImpl : nn::Hookable<TiedImpl, at::Tensor(const at::Tensor&), torch::nn::Module> {
  TiedImpl() : a(4, 4), b(4, 4) {
    b->weight = b->register_parameter("tied", a->weight);
    register_module("a", a);
    register_module("b", b);
  }
  at::Tensor forward_impl(const at::Tensor& x) { return b->forward(a->forward(x)); }
  test::Dense a;
  test::Dense b;
};

TEST(PlanMatchTiedTest, NamesOfOneTensorMustAgree) {
  TiedImpl model;
  const auto mesh = test::planned_mesh({{"tp", 2}});
  ShardingPlan one;
  one.parameter("b.tied", {{"tp", Placement::shard(1)}});
  const MatchedPlan matched = match_plan(one, model, mesh);
  EXPECT_EQ(matched.parameters[0].name, "a.weight");
  EXPECT_EQ(matched.parameters[0].aliases, std::vector<std::string>{"b.tied"});
  EXPECT_EQ(matched.parameters[0].spec.layout.placements[0], Placement::shard(1));
  one.parameter("a.weight", {{"tp", Placement::shard(0)}});
  const std::string text = thrown_by([&] { match_plan(one, model, mesh); });
  HS_EXPECT_HAS(text, "one tied weight");
  HS_EXPECT_HAS(text, "(as 'b.tied')");
}

}  // namespace
}  // namespace hypershard::plan
