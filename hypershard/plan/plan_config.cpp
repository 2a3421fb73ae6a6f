// See plan_config.h.
#include "hypershard/plan/plan_config.h"

#include <algorithm>
#include <cctype>
#include <string>

#include "hypershard/core/error.h"

namespace hypershard::plan {
namespace {

PlanRule read_rule(RuleKind kind, const std::string& pattern, const WordTable& words) {
  PlanRule rule{.kind = kind, .pattern = pattern, .placements = {}};
  const std::size_t mark = pattern.rfind('#');
  if (kind != RuleKind::kParameter && mark != std::string::npos) {
    const std::string number = pattern.substr(mark + 1);
    const bool is_number =
        !number.empty() && number.size() < 4 &&
        std::all_of(number.begin(), number.end(), [](unsigned char c) { return std::isdigit(c); });
    HS_CHECK(
        is_number,
        "plan: ",
        kind,
        " '",
        pattern,
        "': '",
        number,
        "' is no tensor index",
        HS_HINT("write the number of the tensor behind '#', as in \"blocks.*.attn#1\"")
    );
    rule.pattern = pattern.substr(0, mark);
    rule.index = std::stoi(number);
  }
  for (const auto& [axis, word] : words) {
    rule.placements.emplace_back(axis, parse_placement(word));
  }
  return rule;
}

void add_rules(ShardingPlan& plan, RuleKind kind, const PatternTable<WordTable>& table) {
  for (const auto& [pattern, words] : table) {
    plan.add(read_rule(kind, pattern, words));
  }
}

// Every rule by itself, so that all mistakes are reported at once.
void check_table(
    ConfigProblems& problems, const char* key, RuleKind kind, const PatternTable<WordTable>& table
) {
  for (const auto& row : table) {
    try {
      ShardingPlan plan;
      add_rules(plan, kind, {row});
    } catch (const InvalidArgument& error) {
      problems.add(std::string("plan.") + key, error.what_brief());
    }
  }
}

}  // namespace

void bind_plan(Schema& schema, PlanConfig* config) {
  const std::string forms = "placements by mesh axis: replicate, shard(DIM), partial";
  const std::string paths =
      "Module path patterns (`#1` for the second tensor; the root's is empty) "
      "to wanted ";
  schema
      .section(
          "plan",
          "How the model is spread over mesh axes that are no data axes: patterns of names to "
          "placements."
      )
      .bind(
          "parameters",
          &config->parameters,
          {.doc = "Parameter name patterns to placements by mesh axis: replicate, shard(DIM)."}
      )
      .bind("inputs", &config->inputs, {.doc = paths + forms + "."})
      .bind("outputs", &config->outputs, {.doc = paths + forms + "."});
  schema.add_check([config](ConfigProblems& problems) {
    check_table(problems, "parameters", RuleKind::kParameter, config->parameters);
    check_table(problems, "inputs", RuleKind::kInput, config->inputs);
    check_table(problems, "outputs", RuleKind::kOutput, config->outputs);
  });
}

ShardingPlan make_plan(const PlanConfig& config) {
  ShardingPlan plan;
  add_rules(plan, RuleKind::kParameter, config.parameters);
  add_rules(plan, RuleKind::kInput, config.inputs);
  add_rules(plan, RuleKind::kOutput, config.outputs);
  return plan;
}

}  // namespace hypershard::plan
