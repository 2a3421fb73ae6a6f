// Why: the log sink of tests; see log_capture.h.
// It has a lock of its own, because a test reads lines while other threads log.
#include "hypershard/core/log_capture.h"

#include <mutex>

namespace hypershard {

struct LogCapture::Impl {
  mutable std::mutex mutex;
  std::vector<Line> lines;
};

LogCapture::LogCapture() : impl_(new Impl), previous_(set_log_sink(this)) {}

LogCapture::~LogCapture() {
  set_log_sink(previous_);
  delete impl_;
}

std::vector<LogCapture::Line> LogCapture::lines() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->lines;
}

int LogCapture::count(LogLevel level, const std::string& fragment) const {
  int num_found = 0;
  for (const Line& line : lines()) {
    num_found += line.level == level && line.text.find(fragment) != std::string::npos ? 1 : 0;
  }
  return num_found;
}

bool LogCapture::contains(const std::string& fragment) const {
  for (const Line& line : lines()) {
    if (line.text.find(fragment) != std::string::npos) {
      return true;
    }
  }
  return false;
}

void LogCapture::write(const LogRecord& record) {
  const std::lock_guard lock(impl_->mutex);
  impl_->lines.push_back({.level = record.level, .text = log_line(record)});
}

}  // namespace hypershard
