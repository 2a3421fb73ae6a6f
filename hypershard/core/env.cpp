// Why: reading, checking and describing environment variables; see env.h. The rows are in
// env_table.cpp. Values are read when asked for and never kept, so that tests can change them.
#include "hypershard/core/env.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <unistd.h>
#include <utility>
#include <vector>

#include "hypershard/core/error.h"
#include "hypershard/core/log.h"
#include "hypershard/core/suggest.h"

namespace hypershard::env {
namespace {

std::vector<std::string> all_names() {
  std::vector<std::string> names;
  for (const Variable& variable : variables()) {
    names.emplace_back(variable.name);
  }
  return names;
}

const Variable& find(std::string_view name) {
  for (const Variable& variable : variables()) {
    if (variable.name == name) {
      return variable;
    }
  }
  HS_FAIL(
      InternalError,
      "env: variable '",
      name,
      "' has no row in the table",
      HS_HINT("add one to hypershard/core/env_table.cpp")
  );
}

const Variable& find(std::string_view name, Type type) {
  const Variable& variable = find(name);
  HS_ASSERT(variable.type == type, "env: ", name, " is read as another type than its row states");
  return variable;
}

std::string raw_value(const Variable& variable) {
  const char* value = std::getenv(std::string(variable.name).c_str());
  return value == nullptr || *value == '\0' ? std::string(variable.default_value) : value;
}

bool is_bounded(double bound) {
  return std::abs(bound) < 9.2e18;
}

/// The unit that a duration's plain number has, from the variable's name.
std::string_view own_unit(const Variable& variable) {
  return variable.name.ends_with("_MS") ? "ms" : "s";
}

std::string range_text(const Variable& variable) {
  const std::string unit =
      variable.type == Type::kDuration ? " " + std::string(own_unit(variable)) : std::string();
  const bool has_min = is_bounded(variable.min);
  const bool has_max = is_bounded(variable.max);
  if (has_min && has_max) {
    return concat_text(" from ", variable.min, " to ", variable.max, unit);
  }
  if (has_min) {
    return concat_text(" of at least ", variable.min, unit);
  }
  return has_max ? concat_text(" of at most ", variable.max, unit) : "";
}

std::string spaced_choices(const Variable& variable) {
  std::string text;
  for (const char c : variable.choices) {
    text += c == '|' ? std::string(", ") : std::string(1, c);
  }
  return text;
}

std::string expected_text(const Variable& variable) {
  switch (variable.type) {
    case Type::kString:
      return variable.choices.empty() ? "text" : "one of " + spaced_choices(variable);
    case Type::kInt:
      return "an integer" + range_text(variable);
    case Type::kDouble:
      return "a number" + range_text(variable);
    case Type::kBool:
      return "a switch: 1, true, yes, on or 0, false, no, off";
    case Type::kDuration:
      return "a duration" + range_text(variable) + ", such as 500ms, 2.5s or 1m";
  }
  return "";
}

[[noreturn]] void fail_value(
    const Variable& variable, std::string_view value, std::string_view hint
) {
  if (hint.empty()) {
    HS_FAIL(
        InvalidArgument,
        "env: ",
        variable.name,
        "='",
        value,
        "' is not understood: expected ",
        expected_text(variable)
    );
  }
  HS_FAIL(
      InvalidArgument,
      "env: ",
      variable.name,
      "='",
      value,
      "' is not understood: expected ",
      expected_text(variable),
      HS_HINT(hint)
  );
}

/// Parses all of `text`, or returns nothing.
template <class T>
std::optional<T> parse_number(std::string_view text) {
  T value{};
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool is_whole = result.ec == std::errc() && result.ptr == text.data() + text.size();
  return is_whole ? std::optional<T>(value) : std::nullopt;
}

void check_range(const Variable& variable, double value, std::string_view text) {
  if (!(variable.min <= value && value <= variable.max)) {
    fail_value(variable, text, "");
  }
}

std::vector<std::string> split_choices(std::string_view choices) {
  std::vector<std::string> names;
  while (!choices.empty()) {
    const std::size_t bar = choices.find('|');
    names.emplace_back(choices.substr(0, bar));
    choices = bar == std::string_view::npos ? std::string_view() : choices.substr(bar + 1);
  }
  return names;
}

double unit_in_ms(const Variable& variable, std::string_view unit, std::string_view text) {
  constexpr std::array<std::pair<std::string_view, double>, 4> kUnits = {
      {{"ms", 1.0}, {"s", 1e3}, {"m", 6e4}, {"h", 3.6e6}}
  };
  for (const auto& [name, in_ms] : kUnits) {
    if (name == unit) {
      return in_ms;
    }
  }
  fail_value(variable, text, "units are ms, s, m and h");
}

void read_once(const Variable& variable) {
  switch (variable.type) {
    case Type::kString:
      get_string(variable.name);
      break;
    case Type::kInt:
      get_int(variable.name);
      break;
    case Type::kDouble:
      get_double(variable.name);
      break;
    case Type::kBool:
      get_bool(variable.name);
      break;
    case Type::kDuration:
      get_duration_ms(variable.name);
      break;
  }
}

std::string_view shown_default(const Variable& variable) {
  return variable.default_value.empty() ? "(empty)" : variable.default_value;
}

}  // namespace

bool is_set(std::string_view name) {
  const char* value = std::getenv(std::string(find(name).name).c_str());
  return value != nullptr && *value != '\0';
}

std::string get_string(std::string_view name) {
  const Variable& variable = find(name, Type::kString);
  std::string value = raw_value(variable);
  const std::vector<std::string> choices = split_choices(variable.choices);
  if (!choices.empty() && std::find(choices.begin(), choices.end(), value) == choices.end()) {
    fail_value(variable, value, suggestion(value, choices));
  }
  return value;
}

std::int64_t get_int(std::string_view name) {
  const Variable& variable = find(name, Type::kInt);
  const std::string text = raw_value(variable);
  const auto value = parse_number<std::int64_t>(text);
  if (!value.has_value()) {
    fail_value(variable, text, "");
  }
  check_range(variable, static_cast<double>(*value), text);
  return *value;
}

double get_double(std::string_view name) {
  const Variable& variable = find(name, Type::kDouble);
  const std::string text = raw_value(variable);
  const auto value = parse_number<double>(text);
  if (!value.has_value() || !std::isfinite(*value)) {
    fail_value(variable, text, "");
  }
  check_range(variable, *value, text);
  return *value;
}

bool get_bool(std::string_view name) {
  const Variable& variable = find(name, Type::kBool);
  const std::string text = raw_value(variable);
  for (const std::string_view yes : {"1", "true", "yes", "on"}) {
    if (text == yes) {
      return true;
    }
  }
  for (const std::string_view no : {"0", "false", "no", "off"}) {
    if (text == no) {
      return false;
    }
  }
  fail_value(variable, text, "");
}

std::int64_t get_duration_ms(std::string_view name) {
  const Variable& variable = find(name, Type::kDuration);
  const std::string text = raw_value(variable);
  const std::size_t unit_at = std::min(text.find_first_of("hms"), text.size());
  const auto number = parse_number<double>(std::string_view(text).substr(0, unit_at));
  if (!number.has_value() || !std::isfinite(*number)) {
    fail_value(variable, text, "");
  }
  const std::string_view unit =
      unit_at < text.size() ? std::string_view(text).substr(unit_at) : own_unit(variable);
  const double value_ms = *number * unit_in_ms(variable, unit, text);
  check_range(variable, value_ms / unit_in_ms(variable, own_unit(variable), text), text);
  return std::llround(value_ms);
}

void check_all() {
  std::string problems;
  int num_problems = 0;
  for (const Variable& variable : variables()) {
    try {
      read_once(variable);
    } catch (const InvalidArgument& error) {
      problems += (num_problems++ == 0 ? "" : "\n") + error.what_brief();
    }
  }
  HS_CHECK(num_problems == 0, problems);
}

int warn_unknown() {
  constexpr std::string_view kPrefix = "HS_";
  constexpr std::string_view kTestPrefix = "HS_TEST_";
  const std::vector<std::string> names = all_names();
  int num_unknown = 0;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view assignment = *entry;
    const std::string name(assignment.substr(0, assignment.find('=')));
    const bool is_ours = name.starts_with(kPrefix) && !name.starts_with(kTestPrefix);
    if (!is_ours || std::find(names.begin(), names.end(), name) != names.end()) {
      continue;
    }
    ++num_unknown;
    const std::string meant = suggestion(name, names);
    HS_LOG_WARN(
        "env: unknown variable ",
        name,
        " is ignored; ",
        meant.empty() ? "`hypershard info env` lists what exists" : meant
    );
  }
  return num_unknown;
}

std::string describe() {
  std::string text;
  for (const Variable& variable : variables()) {
    text += concat_text(
        variable.name,
        " = ",
        is_set(variable.name) ? raw_value(variable) + "   (set; default " : "",
        shown_default(variable),
        is_set(variable.name) ? ")" : "",
        "\n    ",
        variable.doc,
        "\n    Takes ",
        expected_text(variable),
        ".\n"
    );
  }
  return text;
}

std::string describe_markdown() {
  std::string text = "| variable | default | takes | meaning |\n|---|---|---|---|\n";
  for (const Variable& variable : variables()) {
    text += concat_text(
        "| `",
        variable.name,
        "` | ",
        shown_default(variable),
        " | ",
        expected_text(variable),
        " | ",
        variable.doc,
        " |\n"
    );
  }
  return text;
}

}  // namespace hypershard::env
