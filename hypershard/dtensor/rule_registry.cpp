// The registry of rules, and the public functions that reach it.
#include "hypershard/dtensor/internal/rule_registry.h"

#include <algorithm>
#include <mutex>
#include <tuple>

#include "hypershard/core/error.h"
#include "hypershard/dtensor/rules/families.h"

namespace hypershard::dtensor {
namespace internal {

RuleRegistry& RuleRegistry::global() {
  static RuleRegistry* registry = [] {
    auto* made = new RuleRegistry;  // never destroyed: threads may outlive statics
    rules::add_all(*made);
    return made;
  }();
  return *registry;
}

void RuleRegistry::add(
    std::string_view name, std::string_view family, OpRule rule, bool takes_cuts
) {
  HS_CHECK(
      name.find("::") != std::string_view::npos && name.find('.') == std::string_view::npos,
      "dtensor.rules: '",
      name,
      "' is no operator's name: expected namespace::name, no overload"
  );
  const std::unique_lock lock(mutex_);
  const auto [at, is_new] = entries_.try_emplace(
      std::string(name), Entry{std::string(family), std::move(rule), takes_cuts}
  );
  HS_CHECK(
      is_new,
      "dtensor.rules: ",
      name,
      " has a rule already, of family ",
      at->second.family,
      HS_HINT("one rule serves all overloads of an operator")
  );
}

const OpRule* RuleRegistry::find_exact(std::string_view name) const {
  const auto at = entries_.find(name);
  return at == entries_.end() ? nullptr : &at->second.rule;
}

const OpRule* RuleRegistry::find(std::string_view name) const {
  const std::shared_lock lock(mutex_);
  const OpRule* rule = find_exact(name);
  if (rule == nullptr && name.ends_with('_')) {
    rule = find_exact(name.substr(0, name.size() - 1));
  }
  return rule;
}

std::vector<RuledOperator> RuleRegistry::list() const {
  const std::shared_lock lock(mutex_);
  std::vector<RuledOperator> all;
  for (const auto& [name, entry] : entries_) {
    all.push_back({name, entry.family, entry.takes_cuts});
  }
  std::sort(all.begin(), all.end(), [](const RuledOperator& a, const RuledOperator& b) {
    return std::tie(a.family, a.name) < std::tie(b.family, b.name);
  });
  return all;
}

}  // namespace internal

DimMap refuse(std::string what, std::string fix) {
  DimMap map;
  map.refusal = Refusal{std::move(what), std::move(fix)};
  return map;
}

void register_op_rule(std::string_view qualified_name, OpRule rule) {
  internal::RuleRegistry::global().add(qualified_name, "user", std::move(rule));
}

bool has_rule(std::string_view qualified_name) {
  return internal::RuleRegistry::global().find(qualified_name) != nullptr;
}

std::vector<RuledOperator> ruled_operators() {
  return internal::RuleRegistry::global().list();
}

}  // namespace hypershard::dtensor
