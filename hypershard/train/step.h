// Why: one optimizer step, from micro-batches to written weights, and what all ranks must agree on
// in the middle of it.
#pragma once

#include <cstdint>

#include "hypershard/train/agreement.h"
#include "hypershard/train/session.h"

namespace hypershard::train {

class StepCheck;

/// What a step found out; the same on all ranks.
struct StepResult {
  double loss = 0;       ///< mean over the tokens of the step
  double grad_norm = 0;  ///< before clipping; NaN if the optimizer steps in backward
  double lr = 0;
  bool stop = false;  ///< some rank was asked to stop
};

/// Runs step `step`, counted from 0.
///
/// A stop signal on any rank and a failure that a rank brings with it (`pending`, of the work
/// between steps) travel with the loss, so that all ranks act on them in the same step. A loss or
/// gradient that is not finite ends the run on all ranks and names the first parameter with such a
/// value.
/// With a `check` the step is validated; what it finds is for the caller to act on. Optimizer steps
/// in backward are then made after it, with the same result.
/// Collective: all ranks.
/// Errors: AgreedFailure; FoundWrong from a check; CommError.
StepResult run_step(
    const Session& session,
    std::int64_t step,
    const LocalFailure& pending,
    StepCheck* check = nullptr
);

}  // namespace hypershard::train
