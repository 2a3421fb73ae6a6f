// Why: see step.h.
#include "hypershard/train/step.h"

#include <array>
#include <cmath>
#include <exception>
#include <limits>
#include <string>

#include <ATen/ops/zeros.h>

#include "hypershard/core/error.h"
#include "hypershard/core/process.h"
#include "hypershard/core/trace.h"
#include "hypershard/model/gpt.h"
#include "hypershard/optim/optimizer.h"
#include "hypershard/train/exit_code.h"
#include "hypershard/train/step_check.h"

namespace hypershard::train {
namespace {

// Says which micro-batches communicate; see Sync.
void set_sync(const Session& session, bool is_last) {
  const Sync sync = gradient_sync(session.config(), session.world().size());
  session.sharded().set_requires_gradient_sync(is_last || sync != Sync::kLast);
  session.sharded().set_requires_all_reduce(is_last || sync != Sync::kInner);
}

// Runs forward and backward of all micro-batches and returns the sum of this rank's losses.
double accumulate(const Session& session, std::int64_t step, bool may_step) {
  const std::int64_t num_micro = session.config().batch.accumulation;
  double sum = 0;
  for (std::int64_t micro = 0; micro < num_micro; ++micro) {
    set_sync(session, micro + 1 == num_micro);
    session.optimizer().step_in_backward(
        may_step && session.config().optimizer.step_in_backward && micro + 1 == num_micro
    );
    data::Batch batch;
    {
      const TraceSpan span(TraceLane::kData, "batch");
      batch = session.batch(step, micro);
    }
    at::Tensor loss;
    {
      const TraceSpan span(TraceLane::kCompute, "forward");
      loss = session.model().loss(batch.input, batch.target);
    }
    {
      const TraceSpan span(TraceLane::kCompute, "backward");
      loss.backward();
    }
    sum += loss.item<double>();
  }
  const bool is_last_batch = step + 1 == session.config().schedule.steps;
  if (!is_last_batch && session.data().train.has_value()) {
    session.data().train->will_need(step + 1, 0, session.data_rank(), session.num_data_ranks());
  }
  return sum;
}

struct Exchange {
  double loss = 0;
  bool stop = false;
  bool failed = false;
};

// Adds up over all ranks what they must know of each other.
Exchange exchange(const Session& session, double loss_sum, bool failed) {
  at::Tensor sums = at::zeros({3}, at::kDouble);
  double* values = sums.mutable_data_ptr<double>();
  values[0] = session.speaks_for_data_rank() ? loss_sum : 0;
  values[1] = stop_requested() ? 1 : 0;
  values[2] = failed ? 1 : 0;
  const TraceSpan span(TraceLane::kWait, "loss");
  session.everyone().all_reduce(sums, comm::ReduceOp::kSum, "train.loss")->wait();
  const double parts =
      static_cast<double>(session.config().batch.accumulation) * session.num_data_ranks();
  return {.loss = values[0] / parts, .stop = values[1] > 0, .failed = values[2] > 0};
}

[[noreturn]] void stop_at_non_finite(
    const Session& session, std::int64_t step, const char* what, double value
) {
  std::string culprit = session.sharded().find_non_finite();
  if (culprit.empty()) {
    culprit = "all parameters and gradients are finite, so it arose in the forward";
  } else {
    culprit = "the first non-finite one is " + culprit;
  }
  const std::string text = concat_text(
      "train: ",
      what,
      " of step ",
      step + 1,
      " is ",
      value,
      ": ",
      culprit,
      "\n  hint: lower optimizer.lr (now ",
      session.learning_rate(step),
      "), raise schedule.warmup_steps, or set optimizer.clip_norm; go on from an earlier "
      "checkpoint "
      "with --resume"
  );
  throw AgreedFailure(ErrorCode::kInvalidArgument, text);  // raw-throw: all ranks throw the same
}

double clip(const Session& session) {
  const OptimizerSection& config = session.config().optimizer;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const TraceSpan span(TraceLane::kOptimizer, "clip");
  return session.sharded().clip_grad_norm_(
      config.clip_norm == 0 ? kInfinity : config.clip_norm,
      config.clip_p == 0 ? kInfinity : config.clip_p
  );
}

double accumulate_checked(const Session& session, std::int64_t step, StepCheck& check) {
  try {
    check.begin(step);
    const double loss_sum = accumulate(session, step, /*may_step=*/false);
    check.end();
    return loss_sum;
  } catch (const plan::LayoutError& error) {
    // Validation tells a fault to all ranks before it throws.
    throw FoundWrong(user_text(error));  // raw-throw: all ranks throw the same
  } catch (const plan::PeerFailure& error) {
    throw AgreedFailure(error.code(), user_text(error));  // raw-throw: known on all ranks
  } catch (const AgreedFailure&) {
    throw;
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {
    const LocalFailure failure = failure_of(error);
    if (!check.tell_failure(failure)) {
      throw;
    }
    throw AgreedFailure(failure.code, failure.text);  // raw-throw: known on all ranks
  }
}

}  // namespace

StepResult run_step(
    const Session& session, std::int64_t step, const LocalFailure& pending, StepCheck* check
) {
  const double lr = session.learning_rate(step);
  session.optimizer().set_lr(lr);
  session.sharded().zero_grad();
  const double loss_sum = check == nullptr ? accumulate(session, step, /*may_step=*/true)
                                           : accumulate_checked(session, step, *check);
  const Exchange all = exchange(session, loss_sum, pending.failed);
  if (all.failed) {
    agree(session.everyone(), pending);
  }
  if (!std::isfinite(all.loss)) {
    stop_at_non_finite(session, step, "the loss", all.loss);
  }
  double norm = std::numeric_limits<double>::quiet_NaN();  // unknown: backward used gradients up
  if (!session.config().optimizer.step_in_backward) {
    norm = clip(session);
    if (!std::isfinite(norm)) {
      stop_at_non_finite(session, step, "the gradient norm", norm);
    }
  }
  {
    const TraceSpan span(TraceLane::kOptimizer, "step");
    session.optimizer().step();
  }
  return {.loss = all.loss, .grad_norm = norm, .lr = lr, .stop = all.stop};
}

}  // namespace hypershard::train
