// The job of a process: started by torchrun, srun, mpirun or our own launcher, alone or among
// thousands. What `World::join` gives; here is what a program needs beyond World.
#pragma once

#include <memory>
#include <string_view>

#include "hypershard/comm/c10d/launch_env.h"
#include "hypershard/comm/world.h"

namespace hypershard::comm {

/// Joins the job that `info` describes; `World::join` does so with this process's environment.
///
/// Opens the job's store (rank 0, unless the launcher serves it), tells the peers on which host
/// this rank is, and starts this rank's heartbeat. Collective: all ranks of the job. Errors:     as
/// for World::join.
std::shared_ptr<World> join_world(const LaunchInfo& info, const WorldOptions& options = {});

/// Returns how this process was started, with its place among the ranks of its host filled in; that
/// of a job of one rank for worlds that were not joined.
LaunchInfo launch_info(const World& world);

/// Tells the peers that this rank is about to end, and why, so that their errors name the cause and
/// not its consequences; for the `catch` around a program. Does nothing in worlds that were not
/// joined. The first failure of a job wins. Failed collectives report themselves.
void report_failure(World& world, std::string_view text);

}  // namespace hypershard::comm
