// Plans in TOML.
#include "hypershard/plan/plan_config.h"

#include <gtest/gtest.h>

#include "hypershard/plan/test_models.h"

namespace hypershard::plan {
namespace {

using layout::Placement;
using test::thrown_by;

class PlanConfigTest : public ::testing::Test {
 protected:
  PlanConfigTest() { bind_plan(schema_, &config_); }
  std::string problem(const std::string& text) {
    return thrown_by([&] { schema_.load_text(text, "run.toml"); });
  }
  PlanConfig config_;
  Schema schema_;
};

TEST_F(PlanConfigTest, ReadsTheThreeTablesInOrder) {
  schema_.load_text(
      R"toml([plan.parameters]
"z.*.weight" = { tp = "shard(1)", ep = "replicate" }
"a.weight" = { tp = "shard(0)" }
[plan.inputs]
"blocks.*" = { tp = "replicate" }
"blocks.*.attn#1" = { tp = "shard(2)" }
[plan.outputs]
"blocks.*" = { tp = "partial" }
)toml",
      "run.toml"
  );
  const ShardingPlan plan = make_plan(config_);
  ASSERT_EQ(plan.rules().size(), 5U);
  EXPECT_EQ(
      to_text(plan.rules()[0]), "parameter 'z.*.weight': {tp = \"shard(1)\", ep = \"replicate\"}"
  );
  EXPECT_EQ(to_text(plan.rules()[1]), "parameter 'a.weight': {tp = \"shard(0)\"}");
  EXPECT_EQ(to_text(plan.rules()[3]), "input 1 of 'blocks.*.attn': {tp = \"shard(2)\"}");
  EXPECT_EQ(plan.rules()[4].kind, RuleKind::kOutput);
  EXPECT_EQ(plan.rules()[4].placements[0].second, Placement::partial());
}

TEST_F(PlanConfigTest, WhatIsWrittenIsReadAgain) {
  schema_.load_text("[plan.inputs]\n\"b.*#2\" = { tp = \"shard(0)\" }\n", "run.toml");
  const std::string written = schema_.to_toml();
  PlanConfig again;
  Schema schema;
  bind_plan(schema, &again);
  schema.load_text(written, "again.toml");
  EXPECT_EQ(again.inputs, config_.inputs);
  ASSERT_EQ(again.inputs.size(), 1U);
}

TEST_F(PlanConfigTest, OverridesAddAndReplaceRows) {
  const std::vector<std::string> overrides{"plan.outputs.b={tp=\"shard(1)\"}"};
  schema_.load_text("[plan.outputs]\n\"a\" = { tp = \"replicate\" }\n", "run.toml", overrides);
  ASSERT_EQ(config_.outputs.size(), 2U);
  EXPECT_EQ(config_.outputs[1].second[0].second, "shard(1)");
}

TEST_F(PlanConfigTest, MistakesAreReportedAllAtOnceWithTheirPlace) {
  const std::string text = problem(
      R"toml([plan.parameters]
"a" = { tp = "shrad(0)" }
"b" = { tp = "partial" }
[plan.inputs]
"c#x" = { tp = "replicate" }
)toml"
  );
  HS_EXPECT_HAS(text, "run.toml:1");
  HS_EXPECT_HAS(text, "placement 'shrad(0)' is not known");
  HS_EXPECT_HAS(text, "a parameter has one value");
  HS_EXPECT_HAS(text, "'x' is no tensor index");
}

TEST_F(PlanConfigTest, UnknownKeysAndWrongTypesAreErrors) {
  HS_EXPECT_HAS(problem("[plan.input]\n\"a\" = { tp = \"replicate\" }\n"), "did you mean 'inputs'");
  HS_EXPECT_HAS(
      problem("[plan.inputs]\n\"a\" = \"replicate\"\n"),
      "a table from patterns to tables of strings"
  );
  HS_EXPECT_HAS(problem("[plan.inputs]\n\"a\" = { tp = 1 }\n"), "plan.inputs");
}

TEST_F(PlanConfigTest, TheRowOfAWrongTypeIsNamed) {
  const std::string right = "[plan.inputs]\n\"a\" = { tp = \"replicate\" }\n";
  HS_EXPECT_HAS(
      problem(right + "\"b.*\" = \"shard(1)\"\n"),
      "found a table in which \"b.*\" is the string 'shard(1)', expected a table from patterns"
  );
  HS_EXPECT_HAS(
      problem(right + "\"b\" = { dp = \"replicate\", tp = 1 }\n"),
      "in which \"b\" is a table in which tp is the integer 1"
  );
}

TEST_F(PlanConfigTest, TheEmptyPathIsTheRoots) {
  schema_.load_text(
      "[plan.inputs]\n\"\" = { tp = \"shard(0)\" }\n\"#1\" = { tp = \"replicate\" }\n", "run.toml"
  );
  const ShardingPlan plan = make_plan(config_);
  ASSERT_EQ(plan.rules().size(), 2U);
  EXPECT_EQ(to_text(plan.rules()[0]), "input 0 of the root: {tp = \"shard(0)\"}");
  EXPECT_EQ(to_text(plan.rules()[1]), "input 1 of the root: {tp = \"replicate\"}");
  PlanConfig again;
  Schema schema;
  bind_plan(schema, &again);
  schema.load_text(schema_.to_toml(), "again.toml");
  EXPECT_EQ(again.inputs, config_.inputs);
  HS_EXPECT_HAS(
      problem("[plan.parameters]\n\"\" = { tp = \"shard(0)\" }\n"), "the pattern is empty"
  );
}

}  // namespace
}  // namespace hypershard::plan
