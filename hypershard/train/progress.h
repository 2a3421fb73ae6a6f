// Why: a person watches a run through one line. On a terminal it is rewritten in place; in a file
// or a pipe it comes every few steps, so that logs stay short.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "hypershard/train/metrics.h"

namespace hypershard::train {

/// What the line shows beside the metrics of the last step.
struct ProgressState {
  std::int64_t steps = 0;                ///< of the whole run
  std::optional<double> eval_loss = {};  ///< the newest one
  double remaining_s = 0;
};

/// Writes e.g. `step 120/600  loss 2.1034  eval 2.0911  12.3k tok/s  MFU 61%  comm 2.1%  312 MiB
/// eta 2:31`; where something crosses supernodes `comm 2.1% (inside 1.2%, between 0.9%)`.
std::string progress_line(const StepMetrics& metrics, const ProgressState& state);

/// Writes `12.3k`, `4.56M`, `789`: three digits and a unit.
std::string short_count(double value);
/// Writes `312 MiB`, `1.91 GiB`.
std::string short_bytes(std::int64_t bytes);
/// Writes `0:07`, `2:31`, `1:02:03`.
std::string short_duration(double seconds);

/// Prints the line to a file descriptor. A reader that went away does not end the run.
/// Threads: one.
class ProgressPrinter {
 public:
  /// `every`: steps between lines where they cannot be rewritten; 0 prints none. Does not own `fd`.
  ProgressPrinter(int fd, std::int64_t every);
  ~ProgressPrinter();
  ProgressPrinter(const ProgressPrinter&) = delete;
  ProgressPrinter& operator=(const ProgressPrinter&) = delete;

  /// Shows a step. `must_show` prints it even between two due lines (an evaluation, the last step).
  void show(const StepMetrics& metrics, const ProgressState& state, bool must_show);
  /// Prints a line that stays.
  void print(std::string_view line);
  /// Leaves the rewritten line as it is and goes to the next.
  void finish();

 private:
  void write(std::string_view text);

  int fd_;
  std::int64_t every_;
  bool is_terminal_;
  bool line_is_open_ = false;
};

}  // namespace hypershard::train
