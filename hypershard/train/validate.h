// Why: a plan is proved right before a run is started: the first steps of the run, validated.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "hypershard/train/run_config.h"

namespace hypershard::train {

/// What to validate.
struct ValidateRequest {
  const RunConfigFile* config = nullptr;
  std::int64_t steps = 1;
  /// Validate on random tokens of a vocabulary of this size instead of the data; 0: on the data.
  std::int64_t random_vocab = 0;
  std::function<void(const std::string&)> print = {};  ///< called on rank 0 with lines for the user
};

/// Joins the job, runs the steps with every check and the optimizer between them, and leaves it in
/// order. Nothing is written.
///
/// Returns kExitOk, or kExitInterrupted if a stop signal came before the last step. Collective: all
/// ranks of the job. Errors: FoundWrong if a step is not what one rank would do; AgreedFailure; as
/// run_training.
int run_validation(const ValidateRequest& request);

}  // namespace hypershard::train
