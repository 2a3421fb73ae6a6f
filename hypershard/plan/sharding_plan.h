// What a user says about how a model is spread: patterns of module paths, and placements by axis
// name. A plan knows no tensors and no communication; resolving it against a model finds both.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hypershard/layout/placement.h"

namespace hypershard::plan {

/// Placements by axis name, in the order stated. Axes not named are Replicate for parameters and
/// "as it arrives" for activations.
using AxisPlacements = std::vector<std::pair<std::string, layout::Placement>>;

/// Reads `replicate`, `shard(1)`, `partial`, `partial(avg)` (sum, avg, max, min).
/// Errors: InvalidArgument naming the text and the forms there are.
layout::Placement parse_placement(std::string_view text);
/// Writes the form that parse_placement reads.
std::string placement_word(const layout::Placement& placement);
std::string to_text(const AxisPlacements& placements);

/// What a rule of a plan speaks about.
enum class RuleKind : std::uint8_t {
  kParameter,  ///< a parameter or buffer, by its full name
  kInput,      ///< a tensor that enters a module
  kOutput,     ///< a tensor that leaves a module
};
std::string to_text(RuleKind kind);

/// One line of a plan.
struct PlanRule {
  RuleKind kind = RuleKind::kParameter;
  /// Of parameter names (kParameter) or module paths; see core/glob.h. An empty one is the root
  /// module, whose path is empty.
  std::string pattern;
  int index = 0;  ///< which tensor of the arguments or results, in hook order
  AxisPlacements placements;
};
/// Writes like `output 0 of 'blocks.*.mlp': {tp = "replicate"}`.
std::string to_text(const PlanRule& rule);

/// A list of rules; patterns are checked against a model when the plan is matched.
///
/// ```
/// ShardingPlan plan;
/// plan.parameter("blocks.*.mlp.w1.weight", {{"tp", Placement::shard(0)}})
///     .parameter("blocks.*.mlp.w2.weight", {{"tp", Placement::shard(1)}})
///     .input("blocks.*.mlp", {{"tp", Placement::replicate()}})
///     .output("blocks.*.mlp", {{"tp", Placement::replicate()}});
/// ```
/// Threads: const methods from any thread.
class ShardingPlan {
 public:
  /// States how parameters (or buffers) lie. Partial is refused: a parameter has one value.
  /// Errors: InvalidArgument naming the rule, for a bad pattern, an axis stated twice, a negative
  /// dimension or index, or a placement that plans do not state (Flat, Owned).
  ShardingPlan& parameter(std::string_view pattern, AxisPlacements placements);
  /// States how tensor `index` of a module's arguments must lie before its forward runs.
  ShardingPlan& input(std::string_view pattern, AxisPlacements wanted, int index = 0);
  /// States how tensor `index` of a module's result must lie after its forward ran.
  ShardingPlan& output(std::string_view pattern, AxisPlacements wanted, int index = 0);
  /// Adds a rule from elsewhere, e.g. a file.
  ShardingPlan& add(PlanRule rule);
  /// Adds all rules of another plan.
  ShardingPlan& add(const ShardingPlan& other);

  const std::vector<PlanRule>& rules() const { return rules_; }
  bool empty() const { return rules_.empty(); }

 private:
  std::vector<PlanRule> rules_;
};

}  // namespace hypershard::plan
