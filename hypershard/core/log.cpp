// Why: formatting, filtering and the way to stderr (spdlog, which stays private to this file).
// State is leaked on purpose: destructors of other objects may still log at exit.
#include "hypershard/core/log.h"

#include <atomic>
#include <charconv>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <spdlog/logger.h>
#include <spdlog/sinks/stdout_sinks.h>

#include "hypershard/core/env.h"
#include "hypershard/core/error.h"
#include "hypershard/core/internal/source_path.h"

namespace hypershard {
namespace {

/// Ranks that log info and debug lines, as closed intervals.
using Ranks = std::vector<std::pair<int, int>>;

struct Settings {
  LogLevel level = LogLevel::kInfo;
  Ranks ranks = {{0, 0}};
};

struct State {
  std::mutex mutex;
  LogSink* sink = nullptr;  // guarded by mutex
  std::vector<std::unique_ptr<const Settings>>
      all;                                         // guarded by mutex; keeps old settings readable
  std::atomic<const Settings*> settings{nullptr};  // null until configured
  std::once_flag from_environment;
  spdlog::logger stderr_logger{"hypershard", std::make_shared<spdlog::sinks::stderr_sink_mt>()};
};

State& state() {
  static State* const instance = [] {
    auto* created = new State;
    created->stderr_logger.set_pattern("%H:%M:%S.%e %v");
    created->stderr_logger.set_level(spdlog::level::trace);
    created->stderr_logger.flush_on(spdlog::level::trace);
    return created;
  }();
  return *instance;
}

bool parse_rank(std::string_view text, int& rank) {
  const auto result = std::from_chars(text.data(), text.data() + text.size(), rank);
  return result.ec == std::errc() && result.ptr == text.data() + text.size() && rank >= 0;
}

Ranks parse_ranks(std::string_view text) {
  if (text == "all") {
    return {{0, std::numeric_limits<int>::max()}};
  }
  Ranks ranks;
  std::string_view rest = text;
  while (true) {
    const std::size_t comma = rest.find(',');
    const std::string_view item = rest.substr(0, comma);
    const std::size_t dash = item.find('-');
    std::pair<int, int> range;
    bool is_valid = parse_rank(item.substr(0, dash), range.first);
    range.second = range.first;
    if (is_valid && dash != std::string_view::npos) {
      is_valid = parse_rank(item.substr(dash + 1), range.second) && range.first <= range.second;
    }
    HS_CHECK(
        is_valid,
        "log: ranks '",
        text,
        "' are not understood: expected all, or a list such as 0,4-7",
        HS_HINT("set HS_LOG_RANKS=all to hear every rank")
    );
    ranks.push_back(range);
    if (comma == std::string_view::npos) {
      return ranks;
    }
    rest = rest.substr(comma + 1);
  }
}

LogLevel parse_level(std::string_view text) {
  for (const LogLevel level : {LogLevel::kError, LogLevel::kWarn, LogLevel::kInfo}) {
    if (text == to_text(level)) {
      return level;
    }
  }
  return LogLevel::kDebug;
}

void publish(Settings settings) {
  auto kept = std::make_unique<const Settings>(std::move(settings));
  const std::lock_guard lock(state().mutex);
  state().settings.store(kept.get(), std::memory_order_release);
  state().all.push_back(std::move(kept));
}

/// Applies `read` to the settings; returns the fault of a malformed variable.
template <class Read>
std::string read_variable(const Read& read) {
  try {
    read();
  } catch (const InvalidArgument& error) {
    return error.what_brief();
  }
  return "";
}

void configure_from_environment() {
  if (state().settings.load(std::memory_order_acquire) != nullptr) {
    return;
  }
  Settings settings;
  const std::string faults[] = {
      read_variable([&] { settings.level = parse_level(env::get_string("HS_LOG_LEVEL")); }),
      read_variable([&] { settings.ranks = parse_ranks(env::get_string("HS_LOG_RANKS")); }),
  };
  publish(std::move(settings));
  for (const std::string& fault : faults) {
    if (!fault.empty()) {
      internal::write_log(LogLevel::kWarn, __FILE__, fault + "; the default is used");
    }
  }
}

const Settings& current_settings() {
  const Settings* settings = state().settings.load(std::memory_order_acquire);
  if (settings == nullptr) {
    std::call_once(state().from_environment, configure_from_environment);
    settings = state().settings.load(std::memory_order_acquire);
  }
  return *settings;
}

char letter(LogLevel level) {
  return "EWID"[static_cast<int>(level)];
}

}  // namespace

std::string_view to_text(LogLevel level) {
  switch (level) {
    case LogLevel::kError:
      return "error";
    case LogLevel::kWarn:
      return "warn";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kDebug:
      return "debug";
  }
  return "unknown";
}

LogSink* set_log_sink(LogSink* sink) {
  const std::lock_guard lock(state().mutex);
  return std::exchange(state().sink, sink);
}

void configure_log(LogLevel level, std::string_view ranks) {
  publish({.level = level, .ranks = parse_ranks(ranks)});
}

bool log_enabled(LogLevel level) {
  const Settings& settings = current_settings();
  if (level > settings.level) {
    return false;
  }
  const int rank = error_rank().rank;
  if (level <= LogLevel::kWarn || rank < 0) {
    return true;
  }
  for (const auto& [first, last] : settings.ranks) {
    if (first <= rank && rank <= last) {
      return true;
    }
  }
  return false;
}

std::string log_line(const LogRecord& record) {
  std::string line(1, letter(record.level));
  if (record.rank >= 0) {
    line += " rank " + std::to_string(record.rank) + "/" + std::to_string(record.world_size);
  }
  line += " ";
  line += record.module;
  line += " | ";
  line += record.message;
  return line;
}

namespace internal {

void write_log(LogLevel level, const char* file, std::string_view message) {
  const ErrorRank rank = error_rank();
  const LogRecord record{
      .level = level,
      .module = module_of(file),
      .rank = rank.rank,
      .world_size = rank.world_size,
      .message = message,
  };
  const std::lock_guard lock(state().mutex);
  if (state().sink != nullptr) {
    state().sink->write(record);
  } else {
    state().stderr_logger.log(spdlog::level::info, spdlog::string_view_t(log_line(record)));
  }
}

}  // namespace internal
}  // namespace hypershard
