// Why: a run can look healthy and learn from wrong gradients. One step is run with every check
// there is, and its gradients are laid beside those of the same step on one rank without any
// sharding.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include <c10/core/ScalarType.h>

#include "hypershard/plan/gradient_equivalence.h"
#include "hypershard/plan/validation.h"
#include "hypershard/train/agreement.h"
#include "hypershard/train/session.h"

namespace hypershard::train {

/// A step does something else than the model without sharding would. Known on all ranks.
class FoundWrong final : public AgreedFailure {
 public:
  explicit FoundWrong(const std::string& text) : AgreedFailure(ErrorCode::kInvalidArgument, text) {}
};

/// What was found out about a step.
struct StepVerdict {
  std::int64_t step = 0;  ///< counted from 1
  plan::ValidationCounts counts;
  plan::GradientReport gradients;  ///< rank 0: the rows; `passed`, `is_exact` on all ranks
  double reference_loss = 0;       ///< rank 0: mean over the tokens of the step, unsharded
};
/// Writes what was checked in one line, and the worst gradient.
std::string to_text(const StepVerdict& verdict);

/// Validates the step that runs between begin() and end().
///
/// Numbers do not change: the step leaves the same weights as without. It takes several times as
/// long, and rank 0 holds a whole copy of the model and its gradients meanwhile. If gradients of
/// fp32 differ, they get a second look: the step is run on rank 0 once more, in fp64, and what fp32
/// rounds there counts (plan::ExactReference).
/// Life cycle: one object a step. Collective: all methods, on all ranks of the session.
class StepCheck {
 public:
  /// The session must have been made with SessionOptions::validates, and outlive this.
  explicit StepCheck(const Session& session);
  ~StepCheck();
  StepCheck(const StepCheck&) = delete;
  StepCheck& operator=(const StepCheck&) = delete;

  /// Runs step `step` (counted from 0) without sharding on rank 0, then starts to watch.
  /// Errors: plan::LayoutError for parameters that should be alike and differ; AgreedFailure if
  /// rank 0 cannot run it; CommError.
  void begin(std::int64_t step);
  /// Stops watching and compares gradients, which must be reduced and neither clipped nor used up.
  /// Errors: plan::LayoutError; plan::PeerFailure; AgreedFailure if rank 0 cannot look again;
  /// CommError.
  void end();
  /// Tells the other ranks of a failure between begin() and end(), which they then leave by
  /// plan::PeerFailure. Returns whether they know: nobody listens outside.
  bool tell_failure(const LocalFailure& failure);
  const StepVerdict& verdict() const { return verdict_; }

 private:
  struct Reference {
    plan::NamedGradients gradients;         // fp64, rank 0
    std::map<std::string, double> addends;  // see plan::ExactReference
    double loss = 0;
  };
  Reference run_reference(at::ScalarType compute) const;
  void compare();
  void look_again(const plan::NamedGradients& found);

  const Session& session_;
  StepVerdict verdict_;
  plan::NamedGradients reference_;  // rank 0, in the dtype that gradients are compared in
  std::optional<plan::ValidationGuard> guard_;
};

/// Throws if a verdict is bad, on all ranks, with rank 0's table of gradients.
/// Collective: all ranks. Errors: FoundWrong.
void require_passed(const Session& session, const StepVerdict& verdict);

}  // namespace hypershard::train
