// Why: one line form for everything the library says on stderr, cheap when a level is off.
// Progress and metrics of a training run are output, not logging, and do not pass here.
#pragma once

#include <string>
#include <string_view>

#include "hypershard/core/text.h"

namespace hypershard {

/// In order of severity, so that `level <= threshold` means "is logged".
enum class LogLevel { kError = 0, kWarn = 1, kInfo = 2, kDebug = 3 };

std::string_view to_text(LogLevel level);

/// One logged line before it is written.
struct LogRecord {
  LogLevel level = LogLevel::kInfo;
  std::string_view module;  ///< folder of the logging source, such as `comm`
  int rank = -1;            ///< -1 while unknown
  int world_size = 0;
  std::string_view message;
};

/// Takes records in place of stderr: tests capture lines, and fail on a warning nobody expected.
class LogSink {
 public:
  virtual ~LogSink() = default;
  /// Threads: called by any thread, by one at a time. Must not log.
  virtual void write(const LogRecord& record) = 0;
};

/// Sends all following records to `sink`, or to stderr if it is null. Returns the sink before.
///
/// Threads: any. On return no call into the former sink is in progress.
LogSink* set_log_sink(LogSink* sink);

/// Sets the threshold and the ranks that log info and debug lines: `all` or a list such as `0,4-7`.
///
/// Without this call the first line reads HS_LOG_LEVEL and HS_LOG_RANKS, and malformed values fall
/// back to their defaults with a warning (a program refuses them earlier, by `env::check_all`).
/// Errors: InvalidArgument if `ranks` is malformed.
void configure_log(LogLevel level, std::string_view ranks);

/// Tells whether a line of this level would be logged by the calling thread's rank.
///
/// Errors and warnings are logged by every rank: a fault must not hide on a silent rank. Info and
/// debug lines come from the chosen ranks and from processes that have no rank yet.
bool log_enabled(LogLevel level);

/// Writes the record as `HH:MM:SS.mmm I rank 3/8 comm | message` without the time.
std::string log_line(const LogRecord& record);

namespace internal {
void write_log(LogLevel level, const char* file, std::string_view message);
}  // namespace internal
}  // namespace hypershard

#define HS_INTERNAL_LOG(level, ...)                                                       \
  do {                                                                                    \
    if (::hypershard::log_enabled(::hypershard::LogLevel::level)) {                       \
      ::hypershard::internal::write_log(                                                  \
          ::hypershard::LogLevel::level, __FILE__, ::hypershard::concat_text(__VA_ARGS__) \
      );                                                                                  \
    }                                                                                     \
  } while (false)

/// Logs the parts as one line; they are evaluated only if the level is on. Never throws for a bad
/// line.
#define HS_LOG_ERROR(...) HS_INTERNAL_LOG(kError, __VA_ARGS__)
#define HS_LOG_WARN(...) HS_INTERNAL_LOG(kWarn, __VA_ARGS__)
#define HS_LOG_INFO(...) HS_INTERNAL_LOG(kInfo, __VA_ARGS__)
#define HS_LOG_DEBUG(...) HS_INTERNAL_LOG(kDebug, __VA_ARGS__)
