// Why: the training loop: steps, evaluations, checkpoints, metrics, trace, and every way in which a
// run may end.
#pragma once

#include <string>

#include "hypershard/train/run_config.h"
#include "hypershard/train/run_folder.h"

namespace hypershard::train {

/// What to train and where to begin.
struct TrainRequest {
  const RunConfigFile* config = nullptr;
  FolderPolicy folder_policy = FolderPolicy::kRefuse;
  std::string checkpoint = {};  ///< to go on from; empty: from the start
};

/// Joins the job, trains, and leaves it in order.
///
/// Returns kExitOk, or kExitInterrupted if a stop signal ended the run. All ranks return or throw
/// alike, but for communication errors.
/// Collective: all ranks of the job. Threads: the main thread; stop signals must be installed.
/// Errors: AgreedFailure once the ranks have joined; before that, as comm::World::join; CommError.
int run_training(const TrainRequest& request);

}  // namespace hypershard::train
