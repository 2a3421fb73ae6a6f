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
#include "hypershard/train/agreement.h"

namespace hypershard::train {
namespace fs = std::filesystem;

void check_trace_folder(const RunConfig& config) {
  const std::string path = config.trace_path();
  if (path.empty()) {
    return;
  }
  const fs::path parent = fs::absolute(path).lexically_normal().parent_path();
  fs::path existing = parent;
  // The run makes its own folder, with those above it.
  if (parent == fs::absolute(fs::path(config.run.dir) / "").lexically_normal().parent_path()) {
    while (!fs::exists(existing) && existing.has_relative_path()) {
      existing = existing.parent_path();
    }
  }
  if (::access((existing / ".").c_str(), W_OK) != 0) {
    const std::string why = errno_text(errno);
    HS_FAIL(
        IoError,
        "trace: cannot write '",
        path,
        "': folder '",
        existing.string(),
        "': ",
        why,
        HS_HINT("choose another file with --trace or log.trace")
    );
  }
}

TraceWindow::TraceWindow(const RunConfig& config, const comm::World& world)
    : path_(config.trace_path()),
      first_step_(config.log.trace_first_step),
      last_step_(config.log.trace_first_step + config.log.trace_steps - 1),
      rank_(world.rank()),
      world_size_(world.size()) {
  HS_ASSERT(!path_.empty());
  check_trace_folder(config);
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
  // Agreed on by itself: a full disk must not leave the others in the merge's collectives.
  run_together(everyone, [&] { write_trace(world_size_ == 1 ? path_ : part_path(rank_)); });
  run_on_first(everyone, [&] {
    if (world_size_ > 1) {
      merge_parts();
    }
    HS_LOG_INFO("wrote the trace '", path_, "'; ui.perfetto.dev opens it");
  });
}

void TraceWindow::merge_parts() const {
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

}  // namespace hypershard::train
