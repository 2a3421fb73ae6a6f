// Why: some behaviour exists only between real processes: shared mappings, death by a signal, what
// is left behind. Starts a test binary again as the ranks of a job, with a deadline.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "hypershard/core/process.h"

namespace hypershard::testing {

/// A signal to one rank in the middle of a run. A rank that was sent one is killed once all ranks
/// that were not have ended: it may be stopped for good.
struct PlannedSignal {
  int rank = 0;
  int signal = 9;
  std::string after_output = {};  ///< sent once the rank has written this to stdout; "": at once
};

/// What the processes get and how long they may take.
struct ProcessOptions {
  std::vector<std::string> arguments = {};                    ///< of the worker
  std::vector<std::pair<std::string, std::string>> env = {};  ///< for every rank
  std::vector<int> supernodes = {};                           ///< HS_SUPERNODE of each rank
  std::vector<PlannedSignal> signals = {};
  double deadline_s = 60;  ///< then all ranks are killed
};

/// How one rank's process ended and what it wrote.
struct RankResult {
  ExitStatus status;
  std::string out;
  std::string err;
  double seconds = 0;        ///< from the start of the run to the end of the process
  double after_signals = 0;  ///< from the last planned signal; 0 without one
  bool killed_at_deadline = false;
};

/// Writes a rank's result with its output, for messages.
std::string to_text(const RankResult& result);

/// Runs the registered worker `name` (see worker.h) as `num_ranks` processes and waits for them.
///
/// Each finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT (free when
/// the run starts) and HS_JOB_NONCE (of this run alone) in its environment, and one thread a rank
/// for operators. On return none of the processes lives. At the deadline the output of every rank
/// goes to stderr.
/// Errors: IoError if a process cannot be started.
std::vector<RankResult> run_processes(
    int num_ranks, const std::string& name, const ProcessOptions& options = {}
);

/// What processes could leave behind on this host.
struct Leftovers {
  std::vector<std::string> dev_shm;   ///< names in /dev/shm
  std::vector<std::string> sockets;   ///< abstract sockets of this program's runs
  std::vector<std::string> children;  ///< of this process, dead ones too
};

/// Looks what there is now.
Leftovers find_leftovers();

/// Returns "" if nothing is there that was not there before, else what is. Waits a little for what
/// other programs on the host use for a moment only.
std::string new_leftovers(const Leftovers& before);

}  // namespace hypershard::testing
