// Why: every environment variable is declared in one table (env_table.cpp), so that `hypershard
// info env`, the documentation and the checks can never disagree about what exists.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace hypershard::env {

/// How a variable's text is read.
enum class Type {
  kString,
  kInt,       ///< 64-bit integer
  kDouble,    ///< finite number
  kBool,      ///< 1, true, yes, on or 0, false, no, off
  kDuration,  ///< a number in the unit that the name ends with (_S, _MS), or with a unit:
              ///< 500ms, 2.5s, 1m
};

/// One row of the table. An unset or empty variable counts as its default.
struct Variable {
  std::string_view name;
  Type type = Type::kString;
  std::string_view default_value;  ///< as one would write it in the environment
  std::string_view doc;
  std::string_view choices = {};  ///< for kString: the only values, separated by '|'
  double min = -9.3e18;           ///< for numbers, in the variable's own unit
  double max = 9.3e18;
};

/// Returns the table, ordered by name.
std::span<const Variable> variables();

/// Tells whether the variable is set to something.
/// Errors: InternalError if no row has this name, as in every function here.
bool is_set(std::string_view name);

/// Returns the value, or the default of an unset variable.
///
/// Threads: any, as long as no thread changes the environment meanwhile.
/// Errors: InvalidArgument naming variable, value and what was expected.
std::string get_string(std::string_view name);
std::int64_t get_int(std::string_view name);
double get_double(std::string_view name);
bool get_bool(std::string_view name);
/// In milliseconds, whatever the unit of the variable.
std::int64_t get_duration_ms(std::string_view name);

/// Reads every variable once, so that a program can refuse all malformed values before it starts.
/// Errors: InvalidArgument listing every malformed variable.
void check_all();

/// Logs a warning for each set `HS_*` variable without a row and names the nearest row. `HS_TEST_*`
/// belongs to test binaries and is left alone.
/// Returns how many there were.
int warn_unknown();

/// Writes the table with current values for a terminal.
std::string describe();
/// Writes the table as Markdown for docs/environment.md; independent of the environment.
std::string describe_markdown();

}  // namespace hypershard::env
