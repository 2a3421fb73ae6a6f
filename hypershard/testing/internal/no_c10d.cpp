// Why: stands in for gloo_rank_job.cpp in builds without the c10d back ends (sanitizers).
#include "hypershard/core/error.h"
#include "hypershard/testing/internal/rank_job.h"

namespace hypershard::testing::internal {

RankJob make_gloo_rank_job(layout::Topology, double) {
  HS_FAIL(Unsupported, "run_ranks: back end gloo is not part of this build");
}

}  // namespace hypershard::testing::internal
