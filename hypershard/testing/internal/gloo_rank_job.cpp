// Why: the only file of `testing` that needs the c10d back ends.
#include <utility>

#include "hypershard/comm/c10d/gloo_job.h"
#include "hypershard/testing/internal/rank_job.h"

namespace hypershard::testing::internal {

RankJob make_gloo_rank_job(layout::Topology topology, double timeout_s) {
  auto job = std::make_shared<comm::GlooJob>(std::move(topology), timeout_s);
  return {
      [job](int rank) { return job->world(rank); },
      [job](const std::string& why) { job->abort(why); },
  };
}

}  // namespace hypershard::testing::internal
