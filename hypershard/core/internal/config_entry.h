// Why: what binding, reading, writing and describing a configuration share: one record per key,
// with the value in a form that knows neither the bound field nor the TOML parser.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "hypershard/core/config.h"

namespace hypershard::internal {

/// `std::monostate` is the value of an optional key that is not given.
using ConfigValue = std::variant<
    std::monostate,
    bool,
    std::int64_t,
    double,
    std::string,
    std::vector<std::int64_t>,
    std::vector<double>,
    std::vector<std::string>,
    PatternTable<std::string>,
    PatternTable<double>,
    PatternTable<WordTable>>;

enum class ConfigKind {
  kBool,
  kInt,
  kReal,
  kString,
  kIntList,
  kRealList,
  kStringList,
  kStringTable,
  kRealTable,
  kWordsTable,
};

inline constexpr double kNoLimit = std::numeric_limits<double>::infinity();

struct ConfigEntry {
  ConfigKind kind = ConfigKind::kBool;
  std::function<ConfigValue()> get = {};
  std::function<void(const ConfigValue&)> set = {};
  std::string doc = {};
  bool required = false;

  // Limits, each for the kinds it makes sense for.
  std::int64_t int_min = std::numeric_limits<std::int64_t>::min();
  std::int64_t int_max = std::numeric_limits<std::int64_t>::max();
  double min = -kNoLimit;
  double max = kNoLimit;
  double above = -kNoLimit;
  double below = kNoLimit;
  std::size_t min_items = 0;
  std::size_t max_items = SIZE_MAX;
  std::vector<std::string> words = {};  // of a kString; empty: any

  // Filled by ConfigSection::add.
  std::string section = {};
  std::string key = {};
  ConfigValue default_value = {};

  std::string path() const { return section.empty() ? key : section + "." + key; }
};

/// A value that was found and the place it was found at.
struct GivenValue {
  ConfigValue value;
  std::string where;
};

struct SectionState {
  std::string name;
  std::string doc;
  std::unique_ptr<ConfigSection> section;
};

struct SchemaState {
  std::vector<SectionState> sections;
  std::vector<ConfigEntry> entries;
  std::vector<std::function<void(ConfigProblems&)>> checks;

  // Of the last load.
  std::string source_name;
  std::map<std::string, GivenValue> given;  // by path
  std::vector<std::string> problems;
  std::vector<std::string> problem_paths;

  const ConfigEntry* find(std::string_view path) const;
  bool has_section(std::string_view name) const;
  /// Names of keys and sections directly below a section.
  std::vector<std::string> names_in(std::string_view section) const;
  void add_problem(std::string_view where, std::string_view path, std::string_view text);
  bool has_problem_with(std::string_view path) const;
};

/// Says what a key takes: `an integer of at least 1`.
std::string expected_text(const ConfigEntry& entry);
/// Returns why a value of the right type breaks the key's limits; empty if it does not.
std::string limit_problem(const ConfigEntry& entry, const ConfigValue& value);
/// Writes a value as TOML.
std::string toml_text(const ConfigValue& value);

/// Reads a whole TOML text into `given` and `problems`.
void read_config_text(SchemaState& schema, std::string_view text);
/// Reads one `path=value` on top.
void read_config_override(SchemaState& schema, const std::string& override_text);

}  // namespace hypershard::internal
