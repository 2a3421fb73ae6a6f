// Why: one spawned rank: its cores, its stderr and its end.
// Not installed; the launcher's loop works on these.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hypershard/core/process.h"
#include "hypershard/train/launcher.h"

namespace hypershard::train::internal {

/// Cores by number; empty: not pinned.
using CoreSet = std::vector<int>;

/// Deals this process's cores out, equally many consecutive ones a rank; empty if there are fewer
/// cores than ranks.
std::vector<CoreSet> split_cores(int num_ranks);

/// What the ranks of one job share.
struct JobPlace {
  std::string nonce;
  int master_port = 0;
};
JobPlace make_job_place();

/// Where the ranks' stderr goes: to ours, and to a file once its folder exists.
class StderrTee {
 public:
  explicit StderrTee(std::string log_path) : log_path_(std::move(log_path)) {}
  ~StderrTee();
  StderrTee(const StderrTee&) = delete;
  StderrTee& operator=(const StderrTee&) = delete;

  /// Passes whole lines on; a reader or disk that fails does not end the job.
  void write(std::string_view lines);

 private:
  void write_log(std::string_view lines);

  std::string log_path_;
  int log_fd_ = -1;
  std::string backlog_;
};

/// One rank, spawned by the constructor; the destructor kills and reaps what is left of it.
class RankProcess {
 public:
  /// Errors: IoError naming the program and the cause.
  RankProcess(
      const LaunchOptions& options,
      const JobPlace& job,
      int rank,
      const CoreSet& cores,
      StderrTee& output
  );
  ~RankProcess();
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;

  bool is_alive() const { return child_.has_value(); }
  /// Returns -1 once stderr is at its end.
  int stderr_fd() const { return stderr_fd_; }
  /// Passes on what the rank has written by now, whole lines only until stderr ends.
  void forward_stderr();
  /// Sends to the rank's process group, if it is alive.
  void send(int signal);
  /// Looks whether it has ended; then end() says how.
  bool poll();
  const RankEnd& end() const { return end_; }

 private:
  void forward_lines();
  void take_line(std::string line);
  void close_stderr();

  StderrTee& output_;
  std::optional<ChildProcess> child_;
  int stderr_fd_ = -1;
  std::uint64_t sent_signals_ = 0;  // a bit each
  std::string unfinished_line_;
  RankEnd end_;
};

}  // namespace hypershard::train::internal
