// Why: run_ranks with processes instead of threads works in another way altogether.
#pragma once

#include <functional>
#include <memory>

#include "hypershard/comm/world.h"
#include "hypershard/testing/run_ranks.h"

namespace hypershard::testing::internal {

/// run_ranks with kShm: see there.
/// Errors: also Unsupported if the c10d back ends, through which processes meet, are not built in.
void run_rank_processes(
    int num_ranks,
    const std::function<void(std::shared_ptr<comm::World>)>& body,
    const RunRanksOptions& options
);

}  // namespace hypershard::testing::internal
