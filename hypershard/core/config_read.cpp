// Why: the one file that sees the TOML parser. It turns a text or a `--set` into checked values and
// collects every problem on the way, rather than stopping at the first.
#include <algorithm>
#include <cmath>
#include <optional>
#include <sstream>

#include <toml++/toml.h>

#include "hypershard/core/error.h"
#include "hypershard/core/glob.h"
#include "hypershard/core/internal/config_entry.h"
#include "hypershard/core/suggest.h"

namespace hypershard::internal {
namespace {

constexpr std::size_t kMaxShown = 60;

std::string shortened(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  if (text.size() > kMaxShown) {
    text.resize(kMaxShown - 3);
    text += "...";
  }
  return text;
}

std::string place_text(const std::string& name, const toml::source_position& place) {
  return place.line == 0 ? name : concat_text(name, ":", place.line, ":", place.column);
}

/// Names type and value of what was found: `the string "abc"`.
std::string found_text(const toml::node& node) {
  std::ostringstream stream;
  node.visit([&stream](const auto& value) { stream << value; });
  const std::string value = shortened(stream.str());
  switch (node.type()) {
    case toml::node_type::string:
      return "the string " +
             (value.starts_with('\'') || value.starts_with('"') ? value : toml_quoted(value));
    case toml::node_type::integer:
      return "the integer " + value;
    case toml::node_type::floating_point:
      return "the number " + value;
    case toml::node_type::boolean:
      return value;
    case toml::node_type::array:
      return "the list " + value;
    case toml::node_type::table:
      return "a table";
    default:
      return "the date or time " + value;
  }
}

/// Returns the rows of a table in the order of the file, since the parser sorts them by key;
/// nothing if the node is no table or `read` returns nothing for a value.
template <class T, class Read>
std::optional<PatternTable<T>> rows_in_order(const toml::node& node, const Read& read) {
  const toml::table* table = node.as_table();
  if (table == nullptr) {
    return std::nullopt;
  }
  std::vector<std::pair<toml::source_position, std::pair<std::string, T>>> rows;
  for (const auto& [key, item] : *table) {
    const std::optional<T> value = read(item);
    if (!value.has_value()) {
      return std::nullopt;
    }
    rows.push_back({key.source().begin, {std::string(key.str()), *value}});
  }
  std::sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) {
    return a.first < b.first;
  });
  PatternTable<T> sorted;
  for (auto& row : rows) {
    sorted.push_back(std::move(row.second));
  }
  return sorted;
}

/// Reads one TOML value as T, or returns nothing. An integer serves as a number, never the reverse.
template <class T>
std::optional<T> exact_value(const toml::node& node) {
  if constexpr (std::is_same_v<T, WordTable>) {
    return rows_in_order<std::string>(node, [](const toml::node& item) {
      return item.value_exact<std::string>();
    });
  } else if constexpr (std::is_same_v<T, double>) {
    if (const auto number = node.value_exact<double>()) {
      return std::isfinite(*number) ? number : std::nullopt;
    }
    const auto integer = node.value_exact<std::int64_t>();
    return integer ? std::optional<double>(static_cast<double>(*integer)) : std::nullopt;
  } else {
    return node.value_exact<T>();
  }
}

template <class T>
std::optional<ConfigValue> list_value(const toml::node& node) {
  const toml::array* array = node.as_array();
  if (array == nullptr) {
    return std::nullopt;
  }
  std::vector<T> values;
  for (const toml::node& item : *array) {
    const auto value = exact_value<T>(item);
    if (!value.has_value()) {
      return std::nullopt;
    }
    values.push_back(*value);
  }
  return values;
}

template <class T>
std::optional<ConfigValue> table_value(const toml::node& node) {
  auto rows = rows_in_order<T>(node, [](const toml::node& item) { return exact_value<T>(item); });
  return rows.has_value() ? std::optional<ConfigValue>(std::move(*rows)) : std::nullopt;
}

template <class T>
std::optional<ConfigValue> single_value(const toml::node& node) {
  const auto value = exact_value<T>(node);
  return value.has_value() ? std::optional<ConfigValue>(*value) : std::nullopt;
}

std::optional<ConfigValue> typed_value(ConfigKind kind, const toml::node& node) {
  switch (kind) {
    case ConfigKind::kBool:
      return single_value<bool>(node);
    case ConfigKind::kInt:
      return single_value<std::int64_t>(node);
    case ConfigKind::kReal:
      return single_value<double>(node);
    case ConfigKind::kString:
      return single_value<std::string>(node);
    case ConfigKind::kIntList:
      return list_value<std::int64_t>(node);
    case ConfigKind::kRealList:
      return list_value<double>(node);
    case ConfigKind::kStringList:
      return list_value<std::string>(node);
    case ConfigKind::kStringTable:
      return table_value<std::string>(node);
    case ConfigKind::kRealTable:
      return table_value<double>(node);
    case ConfigKind::kWordsTable:
      return table_value<WordTable>(node);
  }
  return std::nullopt;
}

/// Returns why a pattern of a table is malformed; empty if none is.
template <class T>
std::string pattern_problem(const PatternTable<T>& table) {
  for (const auto& row : table) {
    if (row.first.empty() && std::is_same_v<T, WordTable>) {
      continue;  // the path of a root; who takes the table says whether there is one
    }
    try {
      const Glob glob(row.first);
    } catch (const InvalidArgument& error) {
      return error.what_brief();
    }
  }
  return "";
}

std::string value_problem(const ConfigEntry& entry, const ConfigValue& value) {
  if (const auto* strings = std::get_if<PatternTable<std::string>>(&value)) {
    return pattern_problem(*strings);
  }
  if (const auto* reals = std::get_if<PatternTable<double>>(&value)) {
    return pattern_problem(*reals);
  }
  if (const auto* words = std::get_if<PatternTable<WordTable>>(&value)) {
    return pattern_problem(*words);
  }
  return limit_problem(entry, value);
}

/// Names the first row of a table whose value has the wrong type: ` in which "a.b" is the integer
/// 1`.
std::string wrong_row_text(const ConfigEntry& entry, const toml::node& node) {
  const toml::table* table = node.as_table();
  const bool has_rows = entry.kind == ConfigKind::kStringTable ||
                        entry.kind == ConfigKind::kRealTable ||
                        entry.kind == ConfigKind::kWordsTable;
  if (table == nullptr || !has_rows) {
    return "";
  }
  for (const auto& [key, item] : *table) {
    const toml::table row{{key.str(), item}};
    if (typed_value(entry.kind, row).has_value()) {
      continue;
    }
    std::string found = found_text(item);
    if (const toml::table* words = item.as_table(); words != nullptr) {
      for (const auto& [word, value] : *words) {
        if (!value.is_string()) {
          found =
              concat_text("a table in which ", std::string(word.str()), " is ", found_text(value));
        }
      }
    }
    return concat_text(" in which ", toml_quoted(std::string(key.str())), " is ", found);
  }
  return "";
}

/// A word of advice for the usual ways to give a wrong type.
std::string type_remedy(const ConfigEntry& entry, const toml::node& node) {
  if (const auto number = node.value_exact<double>(); number && entry.kind == ConfigKind::kInt) {
    const bool is_integral = *number == std::floor(*number) && std::abs(*number) < 9e15;
    return is_integral ? concat_text("; write ", static_cast<std::int64_t>(*number)) : "";
  }
  const bool is_quoted = node.is_string() && entry.kind != ConfigKind::kString;
  return is_quoted ? "; write the value without quotes" : "";
}

void read_value(
    SchemaState& schema, const ConfigEntry& entry, const toml::node& node, const std::string& where
) {
  const auto value = typed_value(entry.kind, node);
  if (!value.has_value()) {
    schema.add_problem(
        where,
        entry.path(),
        concat_text(
            "found ",
            found_text(node),
            wrong_row_text(entry, node),
            ", expected ",
            expected_text(entry),
            type_remedy(entry, node)
        )
    );
    return;
  }
  const std::string problem = value_problem(entry, *value);
  if (!problem.empty()) {
    schema.add_problem(where, entry.path(), problem);
    return;
  }
  schema.given[entry.path()] = {.value = *value, .where = where};
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) {
    text += (text.empty() ? "" : ", ") + name;
  }
  return text;
}

/// Says that a name does not exist, which name was probably meant, and what there is.
std::string unknown_text(
    const SchemaState& schema, const std::string& section, const std::string& name, bool is_table
) {
  const std::vector<std::string> names = schema.names_in(section);
  std::string text = is_table ? "unknown section" : "unknown key";
  for (const ConfigEntry& entry : schema.entries) {
    if (entry.key == name && entry.section != section) {
      text += "; there is a key " + entry.path();
    }
  }
  const std::string owner = section.empty() ? "the top of the file" : "[" + section + "]";
  text += "; " + owner + " takes " + joined(names);
  const std::string meant = suggestion(name, names);
  return meant.empty() ? text : text + "; " + meant;
}

void read_table(SchemaState& schema, const toml::table& table, const std::string& section) {
  for (const auto& [key, node] : table) {
    const std::string name(key.str());
    const std::string path = section.empty() ? name : section + "." + name;
    const std::string where = place_text(schema.source_name, key.source().begin);
    if (const ConfigEntry* entry = schema.find(path)) {
      read_value(schema, *entry, node, place_text(schema.source_name, node.source().begin));
    } else if (!schema.has_section(path)) {
      schema.add_problem(where, path, unknown_text(schema, section, name, node.is_table()));
    } else if (const toml::table* below = node.as_table()) {
      read_table(schema, *below, path);
    } else {
      schema.add_problem(
          where, path, "found " + found_text(node) + ", expected a section [" + path + "]"
      );
    }
  }
}

/// Parses `text`, or adds the parser's complaint and returns nothing.
std::optional<toml::table> parse(
    SchemaState& schema, std::string_view text, const std::string& name
) {
  try {
    return toml::parse(text, name);
  } catch (const toml::parse_error& error) {
    schema.problems.push_back(concat_text(
        place_text(name, error.source().begin), ": not valid TOML: ", error.description()
    ));
  }
  return std::nullopt;
}

}  // namespace

void read_config_text(SchemaState& schema, std::string_view text) {
  const auto table = parse(schema, text, schema.source_name);
  if (!table.has_value()) {
    return;
  }
  if (table->empty()) {
    schema.problems.push_back(schema.source_name + ": the file sets no key");
    return;
  }
  read_table(schema, *table, "");
}

namespace {

std::string trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  const std::size_t first = text.find_first_not_of(kSpace);
  if (first == std::string_view::npos) {
    return "";
  }
  return std::string(text.substr(first, text.find_last_not_of(kSpace) - first + 1));
}

bool is_quoted(std::string_view text) {
  return text.size() >= 2 && (text.front() == '"' || text.front() == '\'') &&
         text.back() == text.front();
}

/// Parses one TOML value; nothing if `raw` is not exactly that.
std::optional<toml::table> parse_value(const std::string& raw) {
  try {
    toml::table table = toml::parse("value = " + raw);
    return table.size() == 1 ? std::optional<toml::table>(std::move(table)) : std::nullopt;
  } catch (const toml::parse_error&) {
    return std::nullopt;  // the caller takes the text as a string and says what was expected
  }
}

toml::array split_words(std::string raw) {
  if (raw.starts_with('[') && raw.ends_with(']')) {
    raw = raw.substr(1, raw.size() - 2);
  }
  toml::array words;
  std::size_t begin = 0;
  while (begin <= raw.size() && !trimmed(raw).empty()) {
    const std::size_t end = std::min(raw.find(',', begin), raw.size());
    words.push_back(trimmed(std::string_view(raw).substr(begin, end - begin)));
    begin = end + 1;
  }
  return words;
}

/// Makes a table whose `value` is what an override's text means for a key of this kind; nothing if
/// it is a quoted string, or one without quotes, that TOML cannot hold.
std::optional<toml::table> override_value(ConfigKind kind, const std::string& raw) {
  const bool is_list = kind == ConfigKind::kIntList || kind == ConfigKind::kRealList ||
                       kind == ConfigKind::kStringList;
  const bool is_string = kind == ConfigKind::kString || kind == ConfigKind::kStringTable;
  if (is_string) {
    // Taken with its quotes, a slip in the quoting would make a file of another name.
    return parse_value(is_quoted(raw) ? raw : toml_quoted(raw));
  }
  if (auto parsed = parse_value(is_list && !raw.starts_with('[') ? "[" + raw + "]" : raw)) {
    return parsed;
  }
  if (kind == ConfigKind::kStringList) {
    return toml::table{{"value", split_words(raw)}};
  }
  return toml::table{{"value", raw}};
}

struct OverrideTarget {
  const ConfigEntry* entry = nullptr;
  std::string pattern;  // of a table
};

OverrideTarget find_target(const SchemaState& schema, const std::string& path) {
  if (const ConfigEntry* entry = schema.find(path)) {
    return {.entry = entry, .pattern = ""};
  }
  for (const ConfigEntry& entry : schema.entries) {
    const bool is_table = entry.kind == ConfigKind::kStringTable ||
                          entry.kind == ConfigKind::kRealTable ||
                          entry.kind == ConfigKind::kWordsTable;
    const std::string prefix = entry.path() + ".";
    if (is_table && path.starts_with(prefix) && path.size() > prefix.size()) {
      const std::string pattern = path.substr(prefix.size());
      return {
          .entry = &entry,
          .pattern = is_quoted(pattern) ? pattern.substr(1, pattern.size() - 2) : pattern,
      };
    }
  }
  return {};
}

/// Reports the first component of `path` that does not exist.
void add_unknown(SchemaState& schema, const std::string& where, const std::string& path) {
  std::string section;
  for (std::size_t begin = 0;;) {
    const std::size_t dot = path.find('.', begin);
    const std::string name = path.substr(begin, dot - begin);
    const std::string below = section.empty() ? name : section + "." + name;
    if (dot == std::string::npos && schema.has_section(below)) {
      schema.add_problem(
          where,
          path,
          "is a section (expected one of its keys, such as " + below + "." +
              schema.names_in(below).front() + "=...)"
      );
      return;
    }
    if (dot == std::string::npos || !schema.has_section(below)) {
      schema.add_problem(
          where, path, unknown_text(schema, section, name, dot != std::string::npos)
      );
      return;
    }
    section = below;
    begin = dot + 1;
  }
}

/// Replaces or appends one row of a table.
template <class T>
void merge_row(PatternTable<T>& table, const PatternTable<T>& row) {
  for (auto& [pattern, value] : table) {
    if (pattern == row.front().first) {
      value = row.front().second;
      return;
    }
  }
  table.push_back(row.front());
}

void read_table_row(
    SchemaState& schema, const OverrideTarget& target, toml::table value, const std::string& where
) {
  const std::string path = target.entry->path();
  const auto before = schema.given.find(path);
  ConfigValue merged =
      before != schema.given.end() ? before->second.value : target.entry->default_value;
  toml::table row;
  row.insert(target.pattern, std::move(*value.get("value")));
  const std::size_t num_problems = schema.problems.size();
  read_value(schema, *target.entry, row, where);
  if (schema.problems.size() > num_problems) {
    return;
  }
  ConfigValue& given = schema.given[path].value;
  if (auto* strings = std::get_if<PatternTable<std::string>>(&merged)) {
    merge_row(*strings, std::get<PatternTable<std::string>>(given));
  } else if (auto* words = std::get_if<PatternTable<WordTable>>(&merged)) {
    merge_row(*words, std::get<PatternTable<WordTable>>(given));
  } else {
    merge_row(std::get<PatternTable<double>>(merged), std::get<PatternTable<double>>(given));
  }
  given = std::move(merged);
}

}  // namespace

void read_config_override(SchemaState& schema, const std::string& override_text) {
  const std::size_t equals = override_text.find('=');
  const std::string path = trimmed(std::string_view(override_text).substr(0, equals));
  const std::string where = "--set " + shortened(override_text);
  if (equals == std::string::npos || path.empty()) {
    schema.problems.push_back(where + ": expected section.key=value");
    return;
  }
  const OverrideTarget target = find_target(schema, path);
  if (target.entry == nullptr) {
    add_unknown(schema, where, path);
    return;
  }
  auto value = override_value(
      target.entry->kind, trimmed(std::string_view(override_text).substr(equals + 1))
  );
  if (!value.has_value()) {
    schema.add_problem(
        where,
        path,
        "is not valid TOML (expected UTF-8; in double quotes, \\\" for a quote and \\\\ for a "
        "backslash)"
    );
  } else if (target.pattern.empty()) {
    read_value(schema, *target.entry, *value->get("value"), where);
  } else {
    read_table_row(schema, target, *std::move(value), where);
  }
}

}  // namespace hypershard::internal
