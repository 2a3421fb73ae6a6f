// Why: stands in for what needs the c10d back ends in builds without them (sanitizers).
#include "hypershard/core/error.h"
#include "hypershard/testing/internal/rank_job.h"
#include "hypershard/testing/internal/rank_run.h"

namespace hypershard::testing::internal {

RankJob make_gloo_rank_job(layout::Topology, double) {
  HS_FAIL(Unsupported, "run_ranks: back end gloo is not part of this build");
}

void run_rank_processes(int, const std::function<void(std::shared_ptr<comm::World>)>&, const RunRanksOptions&) {
  HS_FAIL(Unsupported, "run_ranks: back end shm is not part of this build");
}

}  // namespace hypershard::testing::internal
