// Why: run_ranks needs two things of a job of threads, whatever joins them.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "hypershard/comm/world.h"
#include "hypershard/layout/topology.h"

namespace hypershard::testing::internal {

struct RankJob {
  std::function<std::shared_ptr<comm::World>(int rank)> world;  ///< called by the rank's thread
  std::function<void(const std::string& why)> abort;            ///< ends every collective
};

/// Makes a job over Gloo and the loopback interface.
/// Errors: Unsupported if the c10d back ends are not built in.
RankJob make_gloo_rank_job(layout::Topology topology, double timeout_s);

}  // namespace hypershard::testing::internal
