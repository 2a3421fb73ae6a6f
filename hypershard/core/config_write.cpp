// Why: the texts made from a schema: resolved TOML, help for the terminal, Markdown, and what a key
// expects. TOML is written here because the forms are few and the order must be the schema's.
#include <algorithm>
#include <cmath>

#include "hypershard/core/config.h"
#include "hypershard/core/internal/config_entry.h"
#include "hypershard/core/suggest.h"
#include "hypershard/core/text.h"

namespace hypershard {

std::string toml_quoted(std::string_view text) {
  constexpr std::string_view kHex = "0123456789ABCDEF";
  std::string quoted = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      quoted += std::string("\\") + c;
    } else if (c == '\n') {
      quoted += "\\n";
    } else if (c == '\t') {
      quoted += "\\t";
    } else if (byte < 0x20 || byte == 0x7f) {
      quoted += std::string("\\u00") + kHex[byte >> 4] + kHex[byte & 15];
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

namespace internal {
namespace {

/// Makes one visitor of several lambdas.
template <class... Visitors>
struct Overloaded : Visitors... {
  using Visitors::operator()...;
};
template <class... Visitors>
Overloaded(Visitors...) -> Overloaded<Visitors...>;

std::string real_text(double value) {
  std::string text = text_of(value);
  const bool looks_integral = text.find_first_of(".en") == std::string::npos;
  return looks_integral ? text + ".0" : text;
}

std::string item_text(std::int64_t value) {
  return text_of(value);
}
std::string item_text(double value) {
  return real_text(value);
}
std::string item_text(const std::string& value) {
  return toml_quoted(value);
}

std::string item_text(const WordTable& words) {
  std::string text = "{";
  for (const auto& [word, value] : words) {
    text += (text.size() == 1 ? " " : ", ") + toml_quoted(word) + " = " + toml_quoted(value);
  }
  return text + (words.empty() ? "}" : " }");
}

template <class T>
std::string list_text(const std::vector<T>& values) {
  std::string text = "[";
  for (const T& value : values) {
    text += (text.size() == 1 ? "" : ", ") + item_text(value);
  }
  return text + "]";
}

template <class T>
std::string table_text(const PatternTable<T>& table) {
  std::string text = "{";
  for (const auto& [pattern, value] : table) {
    text += (text.size() == 1 ? " " : ", ") + toml_quoted(pattern) + " = " + item_text(value);
  }
  return text + (table.empty() ? "}" : " }");
}

/// Joins the bounds that exist: ` of at least 1`, ` above 0 and at most 1`. The ends of the integer
/// types go without saying.
std::string bounds_text(const ConfigEntry& entry) {
  std::vector<std::string> bounds;
  const auto add = [&bounds](bool exists, std::string_view word, const std::string& value) {
    if (exists) {
      bounds.push_back(std::string(word) + " " + value);
    }
  };
  if (entry.kind == ConfigKind::kInt) {
    using Int = std::numeric_limits<int>;
    using Int64 = std::numeric_limits<std::int64_t>;
    const bool has_min = entry.int_min != Int::min() && entry.int_min != Int64::min();
    const bool has_max = entry.int_max != Int::max() && entry.int_max != Int64::max();
    add(has_min, "at least", text_of(entry.int_min));
    add(has_max, "at most", text_of(entry.int_max));
  }
  add(std::isfinite(entry.min), "at least", text_of(entry.min));
  add(std::isfinite(entry.above), "above", text_of(entry.above));
  add(std::isfinite(entry.max), "at most", text_of(entry.max));
  add(std::isfinite(entry.below), "below", text_of(entry.below));
  std::string text;
  for (const std::string& bound : bounds) {
    const bool is_first_at = text.empty() && bound.starts_with("at");
    text += (is_first_at ? " of " : text.empty() ? " " : " and ") + bound;
  }
  return text;
}

std::string words_text(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) {
    text += (text.empty() ? "" : ", ") + toml_quoted(word);
  }
  return text;
}

/// Writes how many items a list has, before their name: `2 `, `1 to 3 `, `at least 1 `.
std::string item_count_text(const ConfigEntry& entry) {
  if (entry.min_items == entry.max_items) {
    return concat_text(entry.min_items, " ");
  }
  if (entry.max_items == SIZE_MAX) {
    return entry.min_items == 0 ? "" : concat_text("at least ", entry.min_items, " ");
  }
  return entry.min_items == 0 ? concat_text("at most ", entry.max_items, " ")
                              : concat_text(entry.min_items, " to ", entry.max_items, " ");
}

std::string list_expected(const ConfigEntry& entry, std::string_view item) {
  std::string bounds = bounds_text(entry);
  if (bounds.starts_with(" of")) {
    bounds.erase(0, 3);
  }
  return concat_text(
      "a list of ", item_count_text(entry), item, bounds.empty() ? "" : ", each" + bounds
  );
}

/// Checks one number against the bounds for numbers.
bool in_bounds(const ConfigEntry& entry, double value) {
  return entry.min <= value && value <= entry.max && entry.above < value && value < entry.below;
}

template <class T>
std::string list_problem(const ConfigEntry& entry, const std::vector<T>& values) {
  if (values.size() < entry.min_items || values.size() > entry.max_items) {
    return concat_text("found ", values.size(), " items, expected ", expected_text(entry));
  }
  if constexpr (!std::is_same_v<T, std::string>) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (!in_bounds(entry, static_cast<double>(values[i]))) {
        return concat_text(
            "item ", i + 1, " is ", item_text(values[i]), ", expected ", expected_text(entry)
        );
      }
    }
  }
  return "";
}

std::string word_problem(const ConfigEntry& entry, const std::string& word) {
  const auto& words = entry.words;
  if (words.empty() || std::find(words.begin(), words.end(), word) != words.end()) {
    return "";
  }
  const std::string meant = suggestion(word, words);
  return concat_text(
      "found ",
      toml_quoted(word),
      ", expected ",
      expected_text(entry),
      meant.empty() ? "" : "; ",
      meant
  );
}

}  // namespace

std::string expected_text(const ConfigEntry& entry) {
  switch (entry.kind) {
    case ConfigKind::kBool:
      return "true or false";
    case ConfigKind::kInt:
      return "an integer" + bounds_text(entry);
    case ConfigKind::kReal:
      return "a number" + bounds_text(entry);
    case ConfigKind::kString:
      return entry.words.empty() ? "a string" : "one of " + words_text(entry.words);
    case ConfigKind::kIntList:
      return list_expected(entry, "integers");
    case ConfigKind::kRealList:
      return list_expected(entry, "numbers");
    case ConfigKind::kStringList:
      return list_expected(entry, "strings");
    case ConfigKind::kStringTable:
      return "a table from patterns to strings";
    case ConfigKind::kRealTable:
      return "a table from patterns to numbers";
    case ConfigKind::kWordsTable:
      return "a table from patterns to tables of strings";
  }
  return "";
}

std::string limit_problem(const ConfigEntry& entry, const ConfigValue& value) {
  const auto expected = [&](const std::string& found) {
    return "found " + found + ", expected " + expected_text(entry);
  };
  return std::visit(
      Overloaded{
          [&](std::int64_t number) {
            if (number > entry.int_max) {
              return concat_text("found ", number, ", expected at most ", entry.int_max);
            }
            return number >= entry.int_min ? std::string() : expected(text_of(number));
          },
          [&](double number) {
            const bool fits = std::isfinite(number) && in_bounds(entry, number);
            return fits ? std::string() : expected(text_of(number));
          },
          [&](const std::string& word) { return word_problem(entry, word); },
          [&](const std::vector<std::int64_t>& values) { return list_problem(entry, values); },
          [&](const std::vector<double>& values) { return list_problem(entry, values); },
          [&](const std::vector<std::string>& values) { return list_problem(entry, values); },
          [](const auto&) { return std::string(); },
      },
      value
  );
}

std::string toml_text(const ConfigValue& value) {
  return std::visit(
      Overloaded{
          [](std::monostate) { return std::string(); },
          [](bool flag) { return text_of(flag); },
          [](std::int64_t number) { return item_text(number); },
          [](double number) { return item_text(number); },
          [](const std::string& text) { return item_text(text); },
          []<class T>(const std::vector<T>& values) { return list_text(values); },
          []<class T>(const PatternTable<T>& table) { return table_text(table); },
      },
      value
  );
}

namespace {

bool is_unset(const ConfigValue& value) {
  return std::holds_alternative<std::monostate>(value);
}

/// Calls `visit` for each key of a section.
template <class Visit>
void for_each_key(const SchemaState& schema, const std::string& section, const Visit& visit) {
  for (const ConfigEntry& entry : schema.entries) {
    if (entry.section == section) {
      visit(entry);
    }
  }
}

std::string default_text(const ConfigEntry& entry) {
  if (entry.required) {
    return "required";
  }
  return is_unset(entry.default_value) ? "unset" : toml_text(entry.default_value);
}

std::string section_toml(const SchemaState& schema, const SectionState& section) {
  std::string keys;
  for_each_key(schema, section.name, [&](const ConfigEntry& entry) {
    const ConfigValue value = entry.get();
    if (!is_unset(value)) {
      keys += entry.key + " = " + toml_text(value) + "\n";
    }
  });
  if (keys.empty() || section.name.empty()) {
    return keys;
  }
  return "[" + section.name + "]\n" + keys;
}

std::string section_help(const SchemaState& schema, const SectionState& section) {
  std::string text = section.name.empty()
                         ? section.doc + "\n"
                         : concat_text("[", section.name, "]  ", section.doc, "\n");
  for_each_key(schema, section.name, [&](const ConfigEntry& entry) {
    text += concat_text(
        "  ",
        entry.key,
        " = ",
        default_text(entry),
        "\n      ",
        entry.doc,
        entry.doc.empty() ? "" : " ",
        "Takes ",
        expected_text(entry),
        ".\n"
    );
  });
  return text;
}

std::string section_markdown(const SchemaState& schema, const SectionState& section) {
  std::string text = concat_text(
      "## ",
      section.name.empty() ? "Top of the file" : "`[" + section.name + "]`",
      "\n\n",
      section.doc,
      section.doc.empty() ? "" : "\n\n",
      "| key | default | takes | meaning |\n|---|---|---|---|\n"
  );
  for_each_key(schema, section.name, [&](const ConfigEntry& entry) {
    const bool has_value = !entry.required && !is_unset(entry.default_value);
    const std::string_view mark = has_value ? "`" : "";
    text += concat_text(
        "| `",
        entry.key,
        "` | ",
        mark,
        default_text(entry),
        mark,
        " | ",
        expected_text(entry),
        " | ",
        entry.doc,
        " |\n"
    );
  });
  return text;
}

/// Joins a text per section that has keys, the top of the file first, with empty lines between.
template <class Text>
std::string join_sections(const SchemaState& schema, const Text& section_text) {
  std::string text;
  const auto add = [&](const SectionState& section) {
    bool has_keys = false;
    for_each_key(schema, section.name, [&](const ConfigEntry&) { has_keys = true; });
    const std::string more = has_keys ? section_text(schema, section) : "";
    text += (text.empty() || more.empty() ? "" : "\n") + more;
  };
  for (const bool top : {true, false}) {
    for (const SectionState& section : schema.sections) {
      if (section.name.empty() == top) {
        add(section);
      }
    }
  }
  return text;
}

}  // namespace
}  // namespace internal

std::string Schema::to_toml() const {
  return internal::join_sections(*state_, internal::section_toml);
}

std::string Schema::describe() const {
  return internal::join_sections(*state_, internal::section_help);
}

std::string Schema::describe_markdown() const {
  return internal::join_sections(*state_, internal::section_markdown);
}

}  // namespace hypershard
