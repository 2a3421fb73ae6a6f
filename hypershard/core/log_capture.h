// Why: tests look at what was logged and must not let an unexpected warning pass.
// A LogCapture takes every record of the process while it lives.
#pragma once

#include <string>
#include <vector>

#include "hypershard/core/log.h"

namespace hypershard {

/// Keeps log records in memory in place of stderr, from construction to destruction.
///
/// Captures nest; the innermost gets the records.
/// Threads: any may log and read; construction and destruction must not race with each other.
class LogCapture : private LogSink {
 public:
  struct Line {
    LogLevel level;
    std::string text;  ///< as `log_line` writes it
  };

  LogCapture();
  ~LogCapture() override;
  LogCapture(const LogCapture&) = delete;
  LogCapture& operator=(const LogCapture&) = delete;

  std::vector<Line> lines() const;
  /// Counts the lines of `level` that contain `fragment`.
  int count(LogLevel level, const std::string& fragment = "") const;
  /// Tells whether any line contains `fragment`.
  bool contains(const std::string& fragment) const;

 private:
  void write(const LogRecord& record) override;

  struct Impl;
  Impl* impl_;  // owned
  LogSink* previous_;
};

}  // namespace hypershard
