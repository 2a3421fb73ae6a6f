// Every rule against the plain operator, on meshes of 2, 4 and 2x2 simulated ranks; and wrong
// rules, to see that the property catches them.
#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>

#include <gtest/gtest.h>

#include "hypershard/core/error.h"
#include "hypershard/dtensor/internal/property/rule_check.h"
#include "hypershard/dtensor/op_rules.h"

namespace hypershard::dtensor::property {
namespace {

using layout::DeviceMesh;
using layout::Topology;

// Enough for every operator to be met with cuts and, where it is linear, with Partial operands.
constexpr int kDraws = 240;
constexpr int kEnough = 10;
constexpr int kLeastCovered = 200;

std::vector<std::pair<std::string, DeviceMesh>> meshes() {
  return {
      {"2", DeviceMesh({{"tp", 2}}, Topology::single_supernode(2))},
      {"4", DeviceMesh({{"tp", 4}}, Topology::single_supernode(4))},
      {"2x2", DeviceMesh({{"dp", 2}, {"tp", 2}}, Topology::single_supernode(4))}
  };
}

TEST(RulePropertyTest, AcceptedLayoutsGatherToThePlainResult) {
  std::map<std::string, std::map<std::string, CheckResult>> by_op;
  int written = 0;
  int filled = 0;
  for (const auto& [mesh_name, mesh] : meshes()) {
    for (const RuleCase& rule_case : all_rule_cases()) {
      const CheckResult result = check_rule(rule_case, mesh, kDraws, kEnough);
      EXPECT_EQ(result.fault, "") << "on mesh " << mesh_name;
      CheckResult& sum = by_op[rule_case.name()][mesh_name];
      sum.accepted += result.accepted;
      sum.partial += result.partial;
      sum.refused += result.refused;
      written += result.written;
      filled += result.filled;
    }
  }
  int covered = 0;
  int passes_partial = 0;
  for (const auto& [name, results] : by_op) {
    for (const auto& [mesh_name, result] : results) {
      EXPECT_GT(result.accepted, 0) << name << " on mesh " << mesh_name << ": " << result.refused
                                    << " calls refused and none accepted";
    }
    ++covered;
    passes_partial += results.at("2").partial > 0 ? 1 : 0;
  }
  RecordProperty("covered", covered);
  EXPECT_GE(covered, kLeastCovered);
  EXPECT_GT(written, 500) << "in-place forms are met too";
  EXPECT_GT(filled, 9000) << "and out forms";
  std::printf(
      "%d operators covered, %d pass Partial on, %d in-place calls, %d out calls\n",
      covered,
      passes_partial,
      written,
      filled
  );
}

TEST(RulePropertyTest, ListedOperatorsAreTheCoveredOnes) {
  std::set<std::string> covered;
  for (const RuleCase& rule_case : all_rule_cases()) {
    covered.insert(rule_case.name());
  }
  for (const RuledOperator& ruled : ruled_operators()) {
    if (ruled.family != "user") {
      EXPECT_EQ(covered.contains(ruled.name), ruled.takes_cuts) << ruled.name;
    }
  }
}

}  // namespace
}  // namespace hypershard::dtensor::property
