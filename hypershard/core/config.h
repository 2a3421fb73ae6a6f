// Why: a run is described by a TOML file, and a slip in it must be caught before hours are spent.
// A Schema binds keys to the fields of plain structs, checks files against them, and documents
// them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace hypershard {

/// Options of a flag, a string or a table.
struct KeyOptions {
  std::string doc;  ///< one sentence
  bool required =
      false;  ///< must be given; otherwise the field's value at bind time is the default
};

/// Options of an integer.
struct IntKey {
  std::optional<std::int64_t> min = {};
  std::optional<std::int64_t> max = {};
  std::string doc = {};
  bool required = false;
};

/// Options of a finite number. `above` and `below` exclude their value, `min` and `max` include it.
struct RealKey {
  std::optional<double> min = {};
  std::optional<double> max = {};
  std::optional<double> above = {};
  std::optional<double> below = {};
  std::string doc = {};
  bool required = false;
};

/// Options of a list; `min` and `max` bound each element of a list of numbers.
struct ListKey {
  std::optional<double> min = {};
  std::optional<double> max = {};
  std::size_t min_items = 0;
  std::size_t max_items = SIZE_MAX;
  std::string doc = {};
  bool required = false;
};

/// A table from module path patterns (see glob.h) to values, in the order of the file.
template <class T>
using PatternTable = std::vector<std::pair<std::string, T>>;

/// A row of named words, e.g. `{ tp = "shard(0)" }`, in the order of the file.
using WordTable = std::vector<std::pair<std::string, std::string>>;

/// Quotes a string as TOML does, so that any text can be handed on in an override.
std::string toml_quoted(std::string_view text);

namespace internal {
struct ConfigEntry;
struct SchemaState;
}  // namespace internal

/// The keys of one `[section]`; made by `Schema::section` and valid as long as the schema.
///
/// Every `bind` keeps the pointer: the field must outlive the schema. `bind` returns the section,
/// so that calls chain. An optional field stays empty unless its key is given. Errors:
/// InternalError if a key is bound twice or its default breaks its own limits.
class ConfigSection {
 public:
  ConfigSection& bind(std::string_view key, bool* field, KeyOptions options);
  ConfigSection& bind(std::string_view key, int* field, IntKey options);
  ConfigSection& bind(std::string_view key, std::int64_t* field, IntKey options);
  ConfigSection& bind(std::string_view key, std::optional<std::int64_t>* field, IntKey options);
  ConfigSection& bind(std::string_view key, double* field, RealKey options);
  ConfigSection& bind(std::string_view key, std::optional<double>* field, RealKey options);
  ConfigSection& bind(std::string_view key, std::string* field, KeyOptions options);
  ConfigSection& bind(std::string_view key, std::optional<std::string>* field, KeyOptions options);
  ConfigSection& bind(std::string_view key, std::vector<std::int64_t>* field, ListKey options);
  ConfigSection& bind(std::string_view key, std::vector<double>* field, ListKey options);
  ConfigSection& bind(std::string_view key, std::vector<std::string>* field, ListKey options);
  ConfigSection& bind(std::string_view key, PatternTable<std::string>* field, KeyOptions options);
  ConfigSection& bind(std::string_view key, PatternTable<double>* field, KeyOptions options);
  ConfigSection& bind(std::string_view key, PatternTable<WordTable>* field, KeyOptions options);

  /// Binds a string that takes only the given words.
  ConfigSection& bind_choice(
      std::string_view key, std::string* field, std::vector<std::string> words, KeyOptions options
  );
  /// Binds an enumeration by the words of its values.
  template <class Enum>
  ConfigSection& bind_choice(
      std::string_view key,
      Enum* field,
      const std::vector<std::pair<std::string, Enum>>& choices,
      KeyOptions options
  );

 private:
  friend class Schema;
  ConfigSection(internal::SchemaState* schema, std::string name)
      : schema_(schema), name_(std::move(name)) {}

  ConfigSection& add(std::string_view key, internal::ConfigEntry entry);
  ConfigSection& bind_index(
      std::string_view key,
      const std::vector<std::string>& words,
      std::function<std::size_t()> get,
      std::function<void(std::size_t)> set,
      KeyOptions options
  );

  internal::SchemaState* schema_;
  std::string name_;
};

/// Collects what is wrong across keys; see `Schema::add_check`.
class ConfigProblems {
 public:
  /// Adds a problem at the place where `path` (`model.num_heads`) was given.
  void add(std::string_view path, std::string_view text);

 private:
  friend class Schema;
  explicit ConfigProblems(internal::SchemaState* schema) : schema_(schema) {}
  internal::SchemaState* schema_;
};

/// The keys of a program and where their values came from.
///
/// ```
/// TrainOptions train;
/// Schema schema;
/// schema.section("train", "Loop and schedule.")
///     .bind("steps", &train.steps, {.min = 1, .doc = "Optimizer steps to run."});
/// schema.load_file("run.toml", overrides);
/// ```
/// Threads: one at a time.
class Schema {
 public:
  Schema();
  ~Schema();
  Schema(const Schema&) = delete;
  Schema& operator=(const Schema&) = delete;

  /// Returns the section `name` (dots nest, `""` is the top of the file), made at the first call.
  ConfigSection& section(std::string_view name, std::string_view doc = "");
  /// Adds a check that runs after every key was read and found good on its own.
  void add_check(std::function<void(ConfigProblems&)> check);

  /// Fills all fields: defaults, then the file, then `overrides` of the form `train.steps=10` (the
  /// value in TOML, or a bare word for a string; items of a list may stand without brackets).
  ///
  /// Errors: IoError if the file cannot be read. InvalidArgument with every problem of file and
  /// overrides, each with place, key, value found, what was expected and the nearest name. After an
  /// error the fields hold a mixture.
  void load_file(const std::string& path, std::span<const std::string> overrides = {});
  /// Does the same with the text of a file that messages call `name`.
  void load_text(
      std::string_view text, const std::string& name, std::span<const std::string> overrides = {}
  );
  /// Does the same without a file.
  void load_defaults(std::span<const std::string> overrides = {});

  /// Tells whether the last load found the key in the file or the overrides.
  bool is_given(std::string_view path) const;
  /// Says where a value came from: `run.toml:12:5`, `--set train.steps=10` or `default`.
  std::string where(std::string_view path) const;

  /// Writes all current values; loading the text gives the same values.
  std::string to_toml() const;
  /// Writes every key with type, range, default and meaning for a terminal.
  std::string describe() const;
  /// Writes the same as Markdown.
  std::string describe_markdown() const;

 private:
  void run_checks();

  std::unique_ptr<internal::SchemaState> state_;
};

template <class Enum>
ConfigSection& ConfigSection::bind_choice(
    std::string_view key,
    Enum* field,
    const std::vector<std::pair<std::string, Enum>>& choices,
    KeyOptions options
) {
  std::vector<std::string> words;
  std::vector<Enum> values;
  for (const auto& [word, value] : choices) {
    words.push_back(word);
    values.push_back(value);
  }
  const auto index = [field, values] {
    std::size_t at = 0;
    while (at < values.size() && values[at] != *field) {
      ++at;
    }
    return at;
  };
  const auto assign = [field, values](std::size_t at) { *field = values.at(at); };
  return bind_index(key, words, index, assign, std::move(options));
}

}  // namespace hypershard
