// The text forms of plans and the checks that need no model.
#include "hypershard/plan/sharding_plan.h"

#include <algorithm>
#include <array>
#include <cctype>

#include "hypershard/core/error.h"
#include "hypershard/core/glob.h"
#include "hypershard/core/suggest.h"

namespace hypershard::plan {

using layout::Placement;

namespace {

constexpr std::string_view kForms = "replicate, shard(DIM), partial, partial(sum|avg|max|min)";
const std::array<std::pair<std::string_view, Placement::Reduce>, 4> kReductions{{
    {"sum", Placement::Reduce::kSum},
    {"avg", Placement::Reduce::kAvg},
    {"max", Placement::Reduce::kMax},
    {"min", Placement::Reduce::kMin},
}};

[[noreturn]] void fail_form(std::string_view text, std::string_view fault) {
  const std::vector<std::string> words{"replicate", "shard(0)", "partial"};
  HS_FAIL(
      InvalidArgument,
      "plan: placement '",
      text,
      "' ",
      fault,
      "; expected one of ",
      kForms,
      HS_HINT(suggestion(text, words))
  );
}

Placement parse_shard(std::string_view text, std::string_view argument) {
  const bool is_number = !argument.empty() && argument.size() < 4 &&
                         std::all_of(argument.begin(), argument.end(), [](unsigned char letter) {
                           return std::isdigit(letter) != 0;
                         });
  if (!is_number) {
    fail_form(text, "names no dimension (a number from 0, counted from the front)");
  }
  return Placement::shard(std::stoi(std::string(argument)));
}

Placement parse_partial(std::string_view text, std::string_view argument) {
  for (const auto& [word, reduce] : kReductions) {
    if (argument == word) {
      return Placement::partial(reduce);
    }
  }
  fail_form(text, "names no reduction");
}

void check_placement(const PlanRule& rule, const std::string& axis, const Placement& placement) {
  using Kind = Placement::Kind;
  HS_CHECK(
      placement.kind != Kind::kFlat && placement.kind != Kind::kOwned,
      "plan: ",
      rule,
      ": axis '",
      axis,
      "' is ",
      placement,
      ", which belongs to the data axes",
      HS_HINT("leave data axes to fully_shard; a plan states ", kForms)
  );
  HS_CHECK(
      placement.kind != Kind::kShard || placement.dim >= 0,
      "plan: ",
      rule,
      ": axis '",
      axis,
      "' shards dimension ",
      placement.dim,
      HS_HINT("count dimensions from the front, from 0")
  );
  HS_CHECK(
      rule.kind != RuleKind::kParameter || placement.kind != Kind::kPartial,
      "plan: ",
      rule,
      ": axis '",
      axis,
      "' is ",
      placement,
      ", but a parameter has one value, not terms of a sum",
      HS_HINT("state shard(DIM) or replicate")
  );
}

void check_pattern(const PlanRule& rule) {
  if (rule.pattern.empty()) {
    HS_CHECK(
        rule.kind != RuleKind::kParameter,
        "plan: ",
        rule,
        ": the pattern is empty (expected names of parameters; ** means all)"
    );
    return;  // the root module
  }
  try {
    const Glob parsed(rule.pattern);
  } catch (const InvalidArgument& error) {
    HS_FAIL(InvalidArgument, "plan: ", rule, ": ", error.what_brief());
  }
}

void check_rule(const PlanRule& rule) {
  check_pattern(rule);
  HS_CHECK(
      rule.index >= 0, "plan: ", rule, ": tensor index ", rule.index, " is negative; count from 0"
  );
  HS_CHECK(
      !rule.placements.empty(),
      "plan: ",
      rule,
      " states no axis",
      HS_HINT("name at least one, as in {tp = \"shard(0)\"}")
  );
  for (std::size_t i = 0; i < rule.placements.size(); ++i) {
    const auto& [axis, placement] = rule.placements[i];
    check_placement(rule, axis, placement);
    for (std::size_t k = 0; k < i; ++k) {
      HS_CHECK(
          rule.placements[k].first != axis,
          "plan: ",
          rule,
          " states axis '",
          axis,
          "' twice",
          HS_HINT("keep one of them")
      );
    }
  }
}

}  // namespace

Placement parse_placement(std::string_view text) {
  if (text == "replicate") {
    return Placement::replicate();
  }
  if (text == "partial") {
    return Placement::partial();
  }
  const std::size_t open = text.find('(');
  if (open == std::string_view::npos || text.back() != ')') {
    fail_form(text, "is not known");
  }
  const std::string_view word = text.substr(0, open);
  const std::string_view argument = text.substr(open + 1, text.size() - open - 2);
  if (word == "shard") {
    return parse_shard(text, argument);
  }
  if (word == "partial") {
    return parse_partial(text, argument);
  }
  fail_form(text, "is not known");
}

std::string placement_word(const Placement& placement) {
  if (placement.kind == Placement::Kind::kShard) {
    return "shard(" + std::to_string(placement.dim) + ")";
  }
  if (placement.kind == Placement::Kind::kPartial) {
    for (const auto& [word, reduce] : kReductions) {
      if (reduce == placement.reduce && reduce != Placement::Reduce::kSum) {
        return concat_text("partial(", word, ")");
      }
    }
    return "partial";
  }
  return placement.kind == Placement::Kind::kReplicate ? "replicate" : to_text(placement);
}

std::string to_text(const AxisPlacements& placements) {
  std::string text = "{";
  for (const auto& [axis, placement] : placements) {
    text += text.size() == 1 ? "" : ", ";
    text += axis + " = \"" + placement_word(placement) + "\"";
  }
  return text + "}";
}

std::string to_text(RuleKind kind) {
  switch (kind) {
    case RuleKind::kParameter:
      return "parameter";
    case RuleKind::kInput:
      return "input";
    case RuleKind::kOutput:
      return "output";
  }
  HS_FAIL(InternalError, "plan: no rule kind has number ", static_cast<int>(kind));
}

std::string to_text(const PlanRule& rule) {
  const std::string placements = to_text(rule.placements);
  if (rule.kind == RuleKind::kParameter) {
    return concat_text("parameter '", rule.pattern, "': ", placements);
  }
  const std::string of = rule.pattern.empty() ? "the root" : "'" + rule.pattern + "'";
  return concat_text(rule.kind, " ", rule.index, " of ", of, ": ", placements);
}

ShardingPlan& ShardingPlan::parameter(std::string_view pattern, AxisPlacements placements) {
  return add(PlanRule{RuleKind::kParameter, std::string(pattern), 0, std::move(placements)});
}

ShardingPlan& ShardingPlan::input(std::string_view pattern, AxisPlacements wanted, int index) {
  return add(PlanRule{RuleKind::kInput, std::string(pattern), index, std::move(wanted)});
}

ShardingPlan& ShardingPlan::output(std::string_view pattern, AxisPlacements wanted, int index) {
  return add(PlanRule{RuleKind::kOutput, std::string(pattern), index, std::move(wanted)});
}

ShardingPlan& ShardingPlan::add(PlanRule rule) {
  check_rule(rule);
  rules_.push_back(std::move(rule));
  return *this;
}

ShardingPlan& ShardingPlan::add(const ShardingPlan& other) {
  const std::vector<PlanRule> rules = other.rules_;  // a plan may be added to itself
  rules_.insert(rules_.end(), rules.begin(), rules.end());
  return *this;
}

}  // namespace hypershard::plan
