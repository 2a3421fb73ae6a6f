// Rules of users' operators, in the form of the built-in ones.
#include <algorithm>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "hypershard/core/error.h"
#include "hypershard/dtensor/op_rules.h"
#include "hypershard/dtensor/rule_call.h"

namespace hypershard::dtensor {
namespace {

using layout::DeviceMesh;
using layout::Placement;
using layout::TensorSpec;

at::Tensor scaled(const at::Tensor& self, double factor) {
  return self * factor;
}
at::Tensor& scaled_(at::Tensor& self, double factor) {
  return self.mul_(factor);
}

TORCH_LIBRARY(hs_user_rules, m) {
  m.def("scaled", scaled);
  m.def("scaled_(Tensor(a!) self, float factor) -> Tensor(a!)");
  m.impl("scaled_", scaled_);
  m.def("lonely", scaled);
  m.def("short_rule", scaled);
}

Verdict judge(const char* name, const TensorSpec& spec) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  const std::vector<c10::IValue> stack = {at::empty({2, 3}), 2.0};
  const std::vector<TensorSpec> specs = {spec};
  return propagate(
      {op, stack, specs}, DeviceMesh({{"tp", 2}}, layout::Topology::single_supernode(2))
  );
}

DimMap scaled_rule(const RuleCall& call) {
  DimMap map;
  Dims dims;
  for (int dim = 0; dim < call.rank(0); ++dim) {
    dims.push_back(Dim::of(map.new_label()));
  }
  map.operands = {{dims}};
  map.outputs = {{dims}};
  map.terms = {{0}};
  return map;
}

TEST(UserRulesTest, ARegisteredRuleServesTheInPlaceFormToo) {
  register_op_rule("hs_user_rules::scaled", scaled_rule);
  EXPECT_TRUE(has_rule("hs_user_rules::scaled"));
  EXPECT_TRUE(has_rule("hs_user_rules::scaled_"));
  const TensorSpec partial = {{2, 3}, {{Placement::partial()}}};
  for (const char* name : {"hs_user_rules::scaled", "hs_user_rules::scaled_"}) {
    const Verdict verdict = judge(name, partial);
    ASSERT_FALSE(verdict.refusal.has_value()) << verdict.refusal->what;
    ASSERT_EQ(verdict.outputs.size(), 1U);
    EXPECT_EQ(verdict.outputs[0], partial);
  }
  const std::vector<RuledOperator> all = ruled_operators();
  EXPECT_TRUE(std::any_of(all.begin(), all.end(), [](const RuledOperator& ruled) {
    return ruled.name == "hs_user_rules::scaled" && ruled.family == "user";
  }));
}

TEST(UserRulesTest, AnOperatorWithoutARuleIsRefusedByName) {
  EXPECT_FALSE(has_rule("hs_user_rules::lonely"));
  const Verdict verdict = judge("hs_user_rules::lonely", {{4, 3}, {{Placement::shard(0)}}});
  ASSERT_TRUE(verdict.refusal.has_value());
  EXPECT_EQ(verdict.refusal->what, "hs_user_rules::lonely has no layout rule");
  EXPECT_NE(
      verdict.refusal->fix.find("register_op_rule(\"hs_user_rules::lonely\""), std::string::npos
  );
}

TEST(UserRulesTest, ARuleIsRegisteredOnceAndByItsFullName) {
  EXPECT_THROW(register_op_rule("aten::mm", scaled_rule), InvalidArgument);
  EXPECT_THROW(register_op_rule("scaled", scaled_rule), InvalidArgument);
  EXPECT_THROW(register_op_rule("hs_user_rules::scaled.out", scaled_rule), InvalidArgument);
}

TEST(UserRulesTest, ARuleThatDoesNotFitItsOperatorIsNamed) {
  register_op_rule("hs_user_rules::short_rule", [](const RuleCall&) { return DimMap(); });
  try {
    judge("hs_user_rules::short_rule", {{2, 3}, {{Placement::replicate()}}});
    FAIL() << "a map without operands was accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("hs_user_rules::short_rule"), std::string::npos);
  }
}

}  // namespace
}  // namespace hypershard::dtensor
