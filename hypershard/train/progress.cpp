// Why: formatting and writing of the progress line. Debian has no progress library for C++, and
// one rewritten line needs no more than a carriage return.
#include "hypershard/train/progress.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <sys/ioctl.h>
#include <unistd.h>

namespace hypershard::train {
namespace {

constexpr std::string_view kEraseLine = "\r\x1b[K";
constexpr int kDefaultColumns = 80;

template <class... Values>
std::string format(const char* pattern, Values... values) {
  std::array<char, 128> buffer{};
  const int length = std::snprintf(buffer.data(), buffer.size(), pattern, values...);
  return std::string(
      buffer.data(), std::min<std::size_t>(buffer.size() - 1, static_cast<std::size_t>(length))
  );
}

// Writes `value` with three significant digits.
std::string three_digits(double value) {
  const int decimals = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  return format("%.*f", decimals, value);
}

std::string percent(double share) {
  return format(share < 0.0995 ? "%.1f%%" : "%.0f%%", 100 * share);
}

int terminal_columns(int fd) {
  winsize size{};
  return ::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : kDefaultColumns;
}

}  // namespace

std::string short_count(double value) {
  constexpr std::array<const char*, 5> kUnits = {"", "k", "M", "G", "T"};
  std::size_t unit = 0;
  while (value >= 999.5 && unit + 1 < kUnits.size()) {
    value /= 1000;
    ++unit;
  }
  return unit == 0 ? format("%.0f", value) : three_digits(value) + kUnits[unit];
}

std::string short_bytes(std::int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1023.5 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return (unit == 0 ? format("%.0f", value) : three_digits(value)) + " " + kUnits[unit];
}

std::string short_duration(double seconds) {
  const auto whole = static_cast<long long>(std::llround(std::max(0.0, seconds)));
  return whole < 3600 ? format("%lld:%02lld", whole / 60, whole % 60)
                      : format("%lld:%02lld:%02lld", whole / 3600, whole / 60 % 60, whole % 60);
}

std::string progress_line(const StepMetrics& metrics, const ProgressState& state) {
  const std::string steps = std::to_string(state.steps);
  std::string line =
      format("step %*lld/", static_cast<int>(steps.size()), static_cast<long long>(metrics.step));
  line += steps + format("  loss %.4f", metrics.loss);
  if (state.eval_loss.has_value()) {
    line += format("  eval %.4f", *state.eval_loss);
  }
  line += "  " + short_count(metrics.tokens_per_s) + " tok/s";
  if (metrics.mfu.has_value()) {
    line += "  MFU " + percent(*metrics.mfu);
  }
  line += "  comm " + percent(metrics.exposed_comm_share);
  if (metrics.between_bytes > 0) {
    line += " (inside " + percent(metrics.exposed_inside_share) + ", between " +
            percent(metrics.exposed_between_share) + ")";
  }
  line += "  " + short_bytes(metrics.peak_bytes);
  return line + "  eta " + short_duration(state.remaining_s);
}

ProgressPrinter::ProgressPrinter(int fd, std::int64_t every)
    : fd_(fd), every_(every), is_terminal_(::isatty(fd) == 1) {}

ProgressPrinter::~ProgressPrinter() {
  finish();
}

void ProgressPrinter::show(const StepMetrics& metrics, const ProgressState& state, bool must_show) {
  if (every_ <= 0) {
    return;
  }
  std::string line = progress_line(metrics, state);
  if (is_terminal_) {
    // A line that wraps cannot be erased.
    line.resize(std::min(line.size(), static_cast<std::size_t>(terminal_columns(fd_) - 1)));
    write(std::string(kEraseLine) + line);
    line_is_open_ = true;
  } else if (must_show || metrics.step % every_ == 0) {
    write(line + "\n");
  }
}

void ProgressPrinter::print(std::string_view line) {
  std::string text = line_is_open_ ? std::string(kEraseLine) : std::string();
  text += line;
  write(text + "\n");
  line_is_open_ = false;
}

void ProgressPrinter::finish() {
  if (line_is_open_) {
    write("\n");
    line_is_open_ = false;
  }
}

void ProgressPrinter::write(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(fd_, text.data(), text.size());
    if (written <= 0) {
      return;  // whoever read it is gone; the metrics file has it all
    }
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

}  // namespace hypershard::train
