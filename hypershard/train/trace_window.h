// Why: a trace of a few steps says what a trace of all says, and can be opened.
#pragma once

#include <cstdint>
#include <string>

#include "hypershard/comm/world.h"
#include "hypershard/train/run_config.h"

namespace hypershard::train {

/// Checks that the trace, if there is to be one, can be written: it is when the run is over, which
/// is too late to hear that it cannot. A folder that the run is going to make counts as good.
/// Errors: IoError.
void check_trace_folder(const RunConfig& config);

/// Records some steps on every rank and joins the ranks' traces in one file.
class TraceWindow {
 public:
  /// Errors: as check_trace_folder; InternalError if there is to be no trace.
  TraceWindow(const RunConfig& config, const comm::World& world);

  /// Starts recording if the step, counted from 1 in this process, is the first of the window.
  void begin_step(std::int64_t step);
  /// Stops recording if it is the last, and says so.
  bool end_step(std::int64_t step);
  /// Writes the file; ranks of other hosts must see the same folder.
  /// Collective: all ranks, not inside run_together. Errors: AgreedFailure; CommError.
  void write(comm::Communicator& everyone);

 private:
  std::string part_path(int rank) const;
  void merge_parts() const;

  std::string path_;
  std::int64_t first_step_;
  std::int64_t last_step_;
  int rank_;
  int world_size_;
};

}  // namespace hypershard::train
