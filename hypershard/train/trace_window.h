// Why: a trace of a few steps says what a trace of all says, and can be opened.
#pragma once

#include <cstdint>
#include <string>

#include "hypershard/comm/world.h"
#include "hypershard/train/run_config.h"

namespace hypershard::train {

/// Records some steps on every rank and joins the ranks' traces in one file.
class TraceWindow {
 public:
  /// Errors: IoError if the file's folder cannot be written to.
  TraceWindow(const LogSection& log, const comm::World& world);

  /// Starts recording if the step, counted from 1 in this process, is the first of the window.
  void begin_step(std::int64_t step);
  /// Stops recording if it is the last, and says so.
  bool end_step(std::int64_t step);
  /// Writes the file; ranks of other hosts must see the same folder.
  /// Collective: all ranks. Errors: IoError.
  void write(comm::Communicator& everyone);

 private:
  std::string part_path(int rank) const;

  std::string path_;
  std::int64_t first_step_;
  std::int64_t last_step_;
  int rank_;
  int world_size_;
};

}  // namespace hypershard::train
