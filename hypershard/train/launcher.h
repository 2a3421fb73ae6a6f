// Why: `--ranks N` starts the ranks of one host and answers for them: nobody is left behind, and
// when one fails, the user learns which and why.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "hypershard/train/exit_code.h"

namespace hypershard::train {

/// What to start.
struct LaunchOptions {
  int num_ranks = 1;
  std::vector<std::string> command;  ///< program (a path) and arguments, the same for every rank
  /// Added to the environment of every rank.
  std::vector<std::pair<std::string, std::string>> environment = {};
  bool pin_cores = true;  ///< give each rank cores of its own if there are enough
  /// Where what ranks write to stderr is kept as well, from when its folder exists; empty: nowhere.
  std::string log_path = {};
  double grace_s = 10;     ///< after a rank failed, the others have so long to end by themselves
  double terminate_s = 3;  ///< then from SIGTERM to SIGKILL
};

/// How one rank ended.
struct RankEnd {
  int rank = 0;
  int exit_code = 0;                    ///< meaningless if `signal` is not 0
  int signal = 0;                       ///< that killed it, 0 if it exited
  bool by_launcher = false;             ///< the signal was ours
  std::vector<std::string> last_lines;  ///< of its stderr
};
std::string to_text(const RankEnd& end);

/// How the job ended.
struct LaunchResult {
  int exit_code = 0;
  std::vector<RankEnd> ends;  ///< in the order in which the ranks ended
  std::string report;         ///< for the user; empty if all went well
};

/// Starts the ranks, passes their stderr on, and returns when all have ended.
///
/// Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and
/// HS_JOB_NONCE. SIGINT, SIGTERM and SIGHUP (unless it is ignored) go on to all ranks; the second
/// one kills them. When a rank fails, the others may end by themselves for a while and are then
/// killed. Ranks die with this process, whatever ends it. The exit code is that of the failure that
/// came first, consequences (communication errors of the others) aside. Threads: one launch at a
/// time, from the main thread; blocks signals of the caller meanwhile. Errors: IoError if a rank
/// cannot be started (the others are ended first).
LaunchResult launch_ranks(const LaunchOptions& options);

}  // namespace hypershard::train
