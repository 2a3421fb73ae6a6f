// Who am I in this job: one answer from the environments of torchrun, srun, mpirun and our own
// launcher. A pure function of the variables, so that every case is a row of a test.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace hypershard::comm {

/// Who started the ranks.
enum class Launcher {
  kNone,        ///< nobody: a job of one rank
  kHypershard,  ///< `hypershard --ranks N`
  kTorchrun,    ///< torchrun, or anything else that sets RANK and WORLD_SIZE
  kMpi,         ///< mpirun of Open MPI, MPICH, Intel MPI …
  kSlurm,       ///< srun
};
std::string to_text(Launcher launcher);

/// A rank's place in its job.
struct LaunchInfo {
  Launcher launcher = Launcher::kNone;
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 1;      ///< ranks that the launcher put on this host; 0: it does not say
  std::string master_addr = {};  ///< where the job's store is; empty for one rank
  int master_port = 0;
  bool store_is_served =
      false;  ///< the launcher serves the store (torchrun's agent); else rank 0 does
  int restart_count = 0;
  std::string run_id = {};  ///< the same on all ranks of a job and unlike that of others, or empty
};

/// Environment variables by name; an empty value counts as unset.
using EnvironmentMap = std::map<std::string, std::string>;

/// Reads this process's environment.
EnvironmentMap process_environment();

/// Finds this rank's place in the job.
///
/// Looks for, in this order: RANK and WORLD_SIZE (ours and torchrun's); OMPI_COMM_WORLD_* (Open
/// MPI); PMI_* (MPICH and its kin), unless SLURM_* of the same step say the same; SLURM_* of a
/// step; nothing. A batch script of Slurm that starts a program without srun is a job of one rank.
/// Errors: InvalidArgument naming the variables and their values if they are malformed, incomplete
/// or contradict each other.
LaunchInfo parse_launch_env(const EnvironmentMap& environment);

/// Returns the first host of a Slurm node list, e.g. `node003` of `node[003-010,012],gpu7`.
/// Errors: InvalidArgument if the list is malformed.
std::string first_host(const std::string& node_list);

}  // namespace hypershard::comm
