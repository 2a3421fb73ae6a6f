// Why: binding keys to fields and running a load; reading TOML is in config_read.cpp and writing in
// config_write.cpp, so that the parser's headers stay in one file.
#include "hypershard/core/config.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <sys/stat.h>

#include "hypershard/core/error.h"
#include "hypershard/core/internal/config_entry.h"
#include "hypershard/core/suggest.h"

namespace hypershard {
namespace {

using internal::ConfigEntry;
using internal::ConfigKind;
using internal::ConfigValue;
using internal::SchemaState;

/// Connects a field to the value type that its key has.
template <class Stored, class Field>
ConfigEntry make_entry(ConfigKind kind, Field* field) {
  return {
      .kind = kind,
      .get = [field] { return ConfigValue(static_cast<Stored>(*field)); },
      .set = [field](const ConfigValue& value
             ) { *field = static_cast<Field>(std::get<Stored>(value)); },
  };
}

template <class Stored>
ConfigEntry make_entry(ConfigKind kind, std::optional<Stored>* field) {
  return {
      .kind = kind,
      .get = [field] { return field->has_value() ? ConfigValue(**field) : ConfigValue(); },
      .set =
          [field](const ConfigValue& value) {
            if (std::holds_alternative<Stored>(value)) {
              *field = std::get<Stored>(value);
            } else {
              field->reset();
            }
          },
  };
}

ConfigEntry with(ConfigEntry entry, const KeyOptions& options) {
  entry.doc = options.doc;
  entry.required = options.required;
  return entry;
}

ConfigEntry with(ConfigEntry entry, const IntKey& options) {
  entry.int_min = std::max(entry.int_min, options.min.value_or(entry.int_min));
  entry.int_max = std::min(entry.int_max, options.max.value_or(entry.int_max));
  entry.doc = options.doc;
  entry.required = options.required;
  return entry;
}

ConfigEntry with(ConfigEntry entry, const RealKey& options) {
  entry.min = options.min.value_or(-internal::kNoLimit);
  entry.max = options.max.value_or(internal::kNoLimit);
  entry.above = options.above.value_or(-internal::kNoLimit);
  entry.below = options.below.value_or(internal::kNoLimit);
  entry.doc = options.doc;
  entry.required = options.required;
  return entry;
}

ConfigEntry with(ConfigEntry entry, const ListKey& options) {
  entry.min = options.min.value_or(-internal::kNoLimit);
  entry.max = options.max.value_or(internal::kNoLimit);
  entry.min_items = options.min_items;
  entry.max_items = options.max_items;
  entry.doc = options.doc;
  entry.required = options.required;
  return entry;
}

// Far above any configuration, and reached at once where a device never ends.
constexpr std::size_t kMaxFileBytes = std::size_t{16} << 20;

std::string read_file(const std::string& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) {
    const std::string reason = errno_text(errno);
    const std::filesystem::path file(path);
    std::vector<std::string> neighbours;
    std::error_code ignored;
    const std::filesystem::path folder = file.has_parent_path() ? file.parent_path() : ".";
    for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
      neighbours.push_back(entry.path().filename().string());
    }
    const std::string meant = suggestion(file.filename().string(), neighbours);
    HS_FAIL(
        IoError,
        "config: cannot read '",
        path,
        "': ",
        reason,
        HS_HINT(meant.empty() ? "check the path; it is relative to the current folder" : meant)
    );
  }
  if (S_ISDIR(status.st_mode)) {
    HS_FAIL(
        IoError, "config: '", path, "' is a folder, not a file", HS_HINT("name a .toml file in it")
    );
  }
  std::ifstream stream(path, std::ios::binary);
  std::string text(kMaxFileBytes + 1, '\0');
  stream.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!stream.is_open() || stream.bad()) {
    HS_FAIL(IoError, "config: cannot read '", path, "': ", errno_text(errno));
  }
  text.resize(static_cast<std::size_t>(stream.gcount()));
  if (text.size() > kMaxFileBytes) {
    HS_FAIL(
        InvalidArgument,
        "config: '",
        path,
        "' is no configuration: it is longer than ",
        kMaxFileBytes,
        " bytes"
    );
  }
  return text;
}

/// Gives every field its default again, so that a second load does not see the first.
void reset(SchemaState& schema, const std::string& source_name) {
  schema.source_name = source_name;
  schema.given.clear();
  schema.problems.clear();
  schema.problem_paths.clear();
  for (const ConfigEntry& entry : schema.entries) {
    entry.set(entry.default_value);
  }
}

void throw_problems(const SchemaState& schema) {
  if (schema.problems.empty()) {
    return;
  }
  if (schema.problems.size() == 1) {
    HS_FAIL(InvalidArgument, "config: ", schema.problems.front());
  }
  std::string text = concat_text("config: ", schema.problems.size(), " problems:");
  for (const std::string& problem : schema.problems) {
    text += "\n  " + problem;
  }
  HS_FAIL(InvalidArgument, text);
}

/// Reads the overrides, then moves all given values into the fields.
void finish(SchemaState& schema, std::span<const std::string> overrides) {
  for (const std::string& override_text : overrides) {
    internal::read_config_override(schema, override_text);
  }
  for (const ConfigEntry& entry : schema.entries) {
    const auto given = schema.given.find(entry.path());
    if (given != schema.given.end()) {
      entry.set(given->second.value);
    } else if (entry.required && !schema.has_problem_with(entry.path())) {
      schema.add_problem(
          schema.source_name, entry.path(), "missing; it needs " + internal::expected_text(entry)
      );
    }
  }
  throw_problems(schema);
}

}  // namespace

namespace internal {

const ConfigEntry* SchemaState::find(std::string_view path) const {
  for (const ConfigEntry& entry : entries) {
    if (entry.path() == path) {
      return &entry;
    }
  }
  return nullptr;
}

bool SchemaState::has_section(std::string_view name) const {
  const std::string below = std::string(name) + ".";
  for (const SectionState& section : sections) {
    if (section.name == name || section.name.starts_with(below)) {
      return true;
    }
  }
  return false;
}

std::vector<std::string> SchemaState::names_in(std::string_view section) const {
  std::vector<std::string> names;
  for (const ConfigEntry& entry : entries) {
    if (entry.section == section) {
      names.push_back(entry.key);
    }
  }
  const std::string prefix = section.empty() ? "" : std::string(section) + ".";
  for (const SectionState& other : sections) {
    if (!other.name.empty() && other.name != section && other.name.starts_with(prefix)) {
      const std::string rest = other.name.substr(prefix.size());
      std::string name = rest.substr(0, rest.find('.'));
      if (std::find(names.begin(), names.end(), name) == names.end()) {
        names.push_back(std::move(name));
      }
    }
  }
  return names;
}

void SchemaState::add_problem(
    std::string_view where, std::string_view path, std::string_view text
) {
  problem_paths.emplace_back(path);
  problems.push_back(concat_text(where, where.empty() ? "" : ": ", path, ": ", text));
}

bool SchemaState::has_problem_with(std::string_view path) const {
  return std::find(problem_paths.begin(), problem_paths.end(), path) != problem_paths.end();
}

}  // namespace internal

ConfigSection& ConfigSection::add(std::string_view key, ConfigEntry entry) {
  entry.section = name_;
  entry.key = key;
  entry.default_value = entry.get();
  const std::string path = entry.path();
  HS_ASSERT(schema_->find(path) == nullptr, "config: key '", path, "' is bound twice");
  HS_ASSERT(!schema_->has_section(path), "config: '", path, "' is a section and a key");
  if (!entry.required) {
    const std::string problem = internal::limit_problem(entry, entry.default_value);
    HS_ASSERT(problem.empty(), "config: default of '", path, "': ", problem);
  }
  schema_->entries.push_back(std::move(entry));
  return *this;
}

ConfigSection& ConfigSection::bind(std::string_view key, bool* field, KeyOptions options) {
  return add(key, with(make_entry<bool>(ConfigKind::kBool, field), options));
}

ConfigSection& ConfigSection::bind(std::string_view key, int* field, IntKey options) {
  ConfigEntry entry = make_entry<std::int64_t>(ConfigKind::kInt, field);
  entry.int_min = std::numeric_limits<int>::min();
  entry.int_max = std::numeric_limits<int>::max();
  return add(key, with(std::move(entry), options));
}

ConfigSection& ConfigSection::bind(std::string_view key, std::int64_t* field, IntKey options) {
  return add(key, with(make_entry<std::int64_t>(ConfigKind::kInt, field), options));
}

ConfigSection& ConfigSection::bind(
    std::string_view key, std::optional<std::int64_t>* field, IntKey options
) {
  return add(key, with(make_entry(ConfigKind::kInt, field), options));
}

ConfigSection& ConfigSection::bind(std::string_view key, double* field, RealKey options) {
  return add(key, with(make_entry<double>(ConfigKind::kReal, field), options));
}

ConfigSection& ConfigSection::bind(
    std::string_view key, std::optional<double>* field, RealKey options
) {
  return add(key, with(make_entry(ConfigKind::kReal, field), options));
}

ConfigSection& ConfigSection::bind(std::string_view key, std::string* field, KeyOptions options) {
  return add(key, with(make_entry<std::string>(ConfigKind::kString, field), options));
}

ConfigSection& ConfigSection::bind(
    std::string_view key, std::optional<std::string>* field, KeyOptions options
) {
  return add(key, with(make_entry(ConfigKind::kString, field), options));
}

ConfigSection& ConfigSection::bind(
    std::string_view key, std::vector<std::int64_t>* field, ListKey options
) {
  return add(
      key, with(make_entry<std::vector<std::int64_t>>(ConfigKind::kIntList, field), options)
  );
}

ConfigSection& ConfigSection::bind(
    std::string_view key, std::vector<double>* field, ListKey options
) {
  return add(key, with(make_entry<std::vector<double>>(ConfigKind::kRealList, field), options));
}

ConfigSection& ConfigSection::bind(
    std::string_view key, std::vector<std::string>* field, ListKey options
) {
  return add(
      key, with(make_entry<std::vector<std::string>>(ConfigKind::kStringList, field), options)
  );
}

ConfigSection& ConfigSection::bind(
    std::string_view key, PatternTable<std::string>* field, KeyOptions options
) {
  return add(
      key, with(make_entry<PatternTable<std::string>>(ConfigKind::kStringTable, field), options)
  );
}

ConfigSection& ConfigSection::bind(
    std::string_view key, PatternTable<double>* field, KeyOptions options
) {
  return add(key, with(make_entry<PatternTable<double>>(ConfigKind::kRealTable, field), options));
}

ConfigSection& ConfigSection::bind(
    std::string_view key, PatternTable<WordTable>* field, KeyOptions options
) {
  return add(
      key, with(make_entry<PatternTable<WordTable>>(ConfigKind::kWordsTable, field), options)
  );
}

ConfigSection& ConfigSection::bind_choice(
    std::string_view key, std::string* field, std::vector<std::string> words, KeyOptions options
) {
  ConfigEntry entry = make_entry<std::string>(ConfigKind::kString, field);
  entry.words = std::move(words);
  return add(key, with(std::move(entry), options));
}

ConfigSection& ConfigSection::bind_index(
    std::string_view key,
    const std::vector<std::string>& words,
    std::function<std::size_t()> get,
    std::function<void(std::size_t)> set,
    KeyOptions options
) {
  ConfigEntry entry;
  entry.kind = ConfigKind::kString;
  entry.words = words;
  entry.get = [words, get = std::move(get)] {
    const std::size_t index = get();
    return ConfigValue(index < words.size() ? words[index] : std::string());
  };
  entry.set = [words, set = std::move(set)](const ConfigValue& value) {
    const auto word = std::find(words.begin(), words.end(), std::get<std::string>(value));
    if (word != words.end()) {
      set(static_cast<std::size_t>(word - words.begin()));
    }
  };
  return add(key, with(std::move(entry), options));
}

void ConfigProblems::add(std::string_view path, std::string_view text) {
  const auto given = schema_->given.find(std::string(path));
  schema_->add_problem(
      given == schema_->given.end() ? schema_->source_name : given->second.where, path, text
  );
}

Schema::Schema() : state_(std::make_unique<SchemaState>()) {}
Schema::~Schema() = default;

ConfigSection& Schema::section(std::string_view name, std::string_view doc) {
  for (internal::SectionState& section : state_->sections) {
    if (section.name == name) {
      section.doc = section.doc.empty() ? doc : section.doc;
      return *section.section;
    }
  }
  HS_ASSERT(state_->find(name) == nullptr, "config: '", name, "' is a key and a section");
  state_->sections.push_back({
      .name = std::string(name),
      .doc = std::string(doc),
      .section = std::unique_ptr<ConfigSection>(new ConfigSection(state_.get(), std::string(name))),
  });
  return *state_->sections.back().section;
}

void Schema::add_check(std::function<void(ConfigProblems&)> check) {
  state_->checks.push_back(std::move(check));
}

void Schema::load_file(const std::string& path, std::span<const std::string> overrides) {
  load_text(read_file(path), path, overrides);
}

void Schema::load_text(
    std::string_view text, const std::string& name, std::span<const std::string> overrides
) {
  reset(*state_, name);
  internal::read_config_text(*state_, text);
  finish(*state_, overrides);
  run_checks();
}

void Schema::load_defaults(std::span<const std::string> overrides) {
  reset(*state_, "");
  finish(*state_, overrides);
  run_checks();
}

void Schema::run_checks() {
  ConfigProblems problems(state_.get());
  for (const auto& check : state_->checks) {
    check(problems);
  }
  throw_problems(*state_);
}

bool Schema::is_given(std::string_view path) const {
  HS_ASSERT(state_->find(path) != nullptr, "config: no key '", path, "'");
  return state_->given.contains(std::string(path));
}

std::string Schema::where(std::string_view path) const {
  return is_given(path) ? state_->given.at(std::string(path)).where : "default";
}

}  // namespace hypershard
