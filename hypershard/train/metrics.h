// Why: a run's numbers are its result, so they are written at once, exactly, and never twice.
// One JSON object a step; whoever plots, compares or resumes a run reads this file.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace hypershard::train {

/// What one optimizer step was like. Values are of the whole job unless they say otherwise.
struct StepMetrics {
  std::int64_t step = 0;                 ///< steps done: the first line says 1
  double loss = 0;                       ///< mean over the step's tokens, nats a token
  std::optional<double> eval_loss = {};  ///< held-out, nats a token; only after an evaluation
  std::optional<double> eval_nats_a_byte = {};  ///< the same for a byte of the held-out text
  double lr = 0;
  double grad_norm = 0;  ///< before clipping; NaN if the optimizer steps in backward
  double step_ms = 0;    ///< from one step's end to the next, evaluation and checkpoint left out
  double tokens_per_s = 0;
  std::optional<double> mfu = {};    ///< share of the GEMM peak measured at start
  double exposed_comm_share = 0;     ///< share of step_ms in which ranks stood waiting, their mean
  double exposed_inside_share = 0;   ///< of that, for what stays inside supernodes
  double exposed_between_share = 0;  ///< and for what crosses them
  /// What a rank sent inside its supernode in a second during which something of its was on the
  /// way, and how much of that time it did not stand waiting; only where something was.
  std::optional<double> inside_bytes_per_s = {};
  std::optional<double> inside_overlap = {};
  std::optional<double> between_bytes_per_s = {};  ///< the same, to other supernodes
  std::optional<double> between_overlap = {};
  std::int64_t peak_bytes = 0;  ///< resident memory at its highest, the largest rank
  /// Memory of the whole job, shared pages counted once (sum of PSS); only where it was measured:
  /// in the first and the last step and with evaluations.
  std::optional<std::int64_t> job_bytes = {};
  std::int64_t tokens_seen = 0;   ///< since the first step of the run, resumed or not
  std::int64_t copied_bytes = 0;  ///< this and all below: in this step, summed over ranks
  std::int64_t accumulated_bytes = 0;
  std::int64_t gathered_bytes = 0;
  std::int64_t reduced_bytes = 0;
  std::int64_t published_bytes = 0;
  std::int64_t inside_bytes = 0;   ///< sent inside supernodes, or what memory made needless to send
  std::int64_t between_bytes = 0;  ///< sent to other supernodes

  bool operator==(const StepMetrics&) const = default;
};

/// Writes metrics as one line of JSON, without the newline. Numbers read back to the same bits;
/// what JSON cannot say (NaN, infinity) becomes null.
std::string to_json(const StepMetrics& metrics);
/// Reads a line that to_json wrote; unknown fields are ignored.
/// Errors: InvalidArgument if `line` is not such an object.
StepMetrics parse_metrics(std::string_view line);

/// Appends steps to a file, each with one write, so that a reader never sees half a line of a step
/// that ended.
/// Threads: one.
class MetricsWriter {
 public:
  /// Opens `path` for the steps after `steps_done`: 0 begins a file, more keeps the lines of those
  /// steps and cuts off what a run that went further had added.
  /// Errors: IoError naming path and cause.
  MetricsWriter(std::string path, std::int64_t steps_done);
  ~MetricsWriter();
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;

  /// Appends one line; when it returns, the kernel has it.
  /// Errors: IoError naming path and cause, e.g. that the disk is full.
  void write(const StepMetrics& metrics);

  const std::string& path() const { return path_; }

 private:
  void cut_after(std::int64_t steps_done);

  std::string path_;
  int fd_ = -1;
};

}  // namespace hypershard::train
