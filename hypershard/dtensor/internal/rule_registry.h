// Holds the rules by operator name.
// Built-in families are added on first use, so that no static constructor runs.
#pragma once

#include <map>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <vector>

#include "hypershard/dtensor/op_rules.h"

namespace hypershard::dtensor::internal {

class RuleRegistry {
 public:
  static RuleRegistry& global();

  /// Errors: InvalidArgument if the operator has a rule.
  void add(std::string_view name, std::string_view family, OpRule rule, bool takes_cuts = true);
  /// Returns the rule of a name, of its functional form (`add_` -> `add`), or null. Rules stay
  /// where they are for the life of the program.
  const OpRule* find(std::string_view name) const;
  std::vector<RuledOperator> list() const;

 private:
  struct Entry {
    std::string family;
    OpRule rule;
    bool takes_cuts = true;
  };
  const OpRule* find_exact(std::string_view name) const;

  mutable std::shared_mutex mutex_;
  std::map<std::string, Entry, std::less<>> entries_;
};

}  // namespace hypershard::dtensor::internal
