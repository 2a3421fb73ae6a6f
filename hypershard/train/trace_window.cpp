// Why: see trace_window.h.
#include "hypershard/train/trace_window.h"

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <unistd.h>
#include <vector>

#include "hypershard/core/error.h"
#include "hypershard/core/log.h"
#include "hypershard/core/trace.h"

namespace hypershard::train {
namespace fs = std::filesystem;

namespace {

// A trace is written when the run is over: too late to hear that it cannot be.
void check_folder(const std::string& path) {
  const fs::path parent = fs::absolute(path).parent_path();
  if (::access(parent.c_str(), W_OK) != 0) {
    HS_FAIL(
        IoError,
        "trace: cannot write '",
        path,
        "': folder '",
        parent.string(),
        "': ",
        errno_text(errno),
        HS_HINT("choose another file with --trace or log.trace")
    );
  }
}

}  // namespace

TraceWindow::TraceWindow(const LogSection& log, const comm::World& world)
    : path_(
          fs::is_directory(log.trace) ? (fs::path(log.trace) / "trace.json").string() : log.trace
      ),
      first_step_(log.trace_first_step),
      last_step_(log.trace_first_step + log.trace_steps - 1),
      rank_(world.rank()),
      world_size_(world.size()) {
  check_folder(path_);
}

void TraceWindow::begin_step(std::int64_t step) {
  if (step == first_step_) {
    start_trace();
  }
}

bool TraceWindow::end_step(std::int64_t step) {
  if (step == last_step_) {
    stop_trace();
  }
  return step == last_step_;
}

std::string TraceWindow::part_path(int rank) const {
  return path_ + ".rank" + std::to_string(rank);
}

void TraceWindow::write(comm::Communicator& everyone) {
  stop_trace();
  write_trace(world_size_ == 1 ? path_ : part_path(rank_));
  everyone.barrier("train.trace")->wait();
  if (rank_ != 0) {
    return;
  }
  if (world_size_ > 1) {
    std::vector<std::string> parts;
    for (int rank = 0; rank < world_size_; ++rank) {
      parts.push_back(part_path(rank));
    }
    merge_traces(parts, path_);
    for (const std::string& part : parts) {
      std::error_code error;
      fs::remove(part, error);  // a part that stays does no harm
    }
  }
  HS_LOG_INFO("wrote the trace '", path_, "'; ui.perfetto.dev opens it");
}

}  // namespace hypershard::train
