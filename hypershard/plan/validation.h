// Validation mode: the same model code on the same plain tensors, with every operator, boundary and
// gradient checked against the plan, and all ranks against each other.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include "hypershard/core/error.h"
#include "hypershard/layout/placement.h"
#include "hypershard/plan/apply.h"

namespace torch::nn {
class Module;
}

namespace hypershard::plan {

/// Where ranks meet and which values are compared; layouts are checked at every operator always.
enum class ValidationLevel : std::uint8_t {
  kBoundaries,  ///< at boundaries, reductions and the ends of forward and backward
  kModules,     ///< and at every hookable module's results
  kOperators,   ///< and at every operator: slow, finds the one whose values differ
};

/// How a step is validated. Equal on all ranks.
struct ValidationOptions {
  ValidationLevel level = ValidationLevel::kModules;
  /// Check random states: equal where results are Replicate, different where they are cut. Ranks
  /// that are threads share libtorch's default generator; give their operators generators of their
  /// own, or switch this off.
  bool check_random = true;
  /// Collectives of the model's own on the plan's axes are an error unless they run inside an
  /// operator that has a rule.
  bool allow_own_collectives = false;
  /// A data-parallel engine owns parameters and gradients (shard/fully_shard.h). Parameters are
  /// then compared as each module begins, when they are whole; reduced gradients are the engine's,
  /// see gradient_equivalence and compare_gradients.
  bool has_engine = false;
};

/// What a guard has seen.
struct ValidationCounts {
  std::int64_t forwards = 0;
  std::int64_t backwards = 0;
  std::int64_t operators = 0;  ///< of forwards, each asked of its rule
  std::int64_t backward_operators = 0;
  std::int64_t boundaries = 0;  ///< crossings in forward
  std::int64_t meetings = 0;
  std::int64_t values = 0;     ///< compared between ranks
  std::size_t table_size = 0;  ///< layouts kept now, see LayoutTable
  std::size_t pending = 0;     ///< records that wait for the next meeting
};

/// Validates everything that the calling thread does with a model under a plan while alive.
///
/// ```
/// const auto applied = plan::apply_plan(*model, plan, mesh, inputs, forward);
/// {
///   plan::ValidationGuard guard(*model, applied);
///   model->forward(x, y).backward();
///   guard.finish();
/// }
/// ```
/// Throws LayoutError, on all ranks, at the operator, boundary, module or gradient that is wrong:
/// an operator that its rule refuses or that has none; a boundary that gets another layout than
/// was resolved; ranks that differ in operators, shapes, dtypes or layouts; Replicate values that
/// differ; random states that differ or agree where they should not; collectives that the plan does
/// not know; a gradient that stays Partial on an axis of the plan, or is reduced without need.
///
/// The model's arguments lie as they did when the plan was resolved; shapes may be others. Tensors
/// from elsewhere count as Replicate unless set_layout says more. Numbers do not change.
/// Collective: construction, every forward and backward, and finish(), on all ranks of the mesh.
/// Errors: LayoutError on all ranks, which are then out of step: end the job, or at least all
/// guards; PeerFailure if another rank told of one; CommError. Threads: the model's; one guard a
/// thread.
class ValidationGuard {
 public:
  /// `model` and what `applied` holds must outlive the guard.
  /// Errors: LayoutError if parameters that should be alike differ between ranks.
  ValidationGuard(
      torch::nn::Module& model, const AppliedPlan& applied, const ValidationOptions& options = {}
  );
  ~ValidationGuard();
  ValidationGuard(const ValidationGuard&) = delete;
  ValidationGuard& operator=(const ValidationGuard&) = delete;

  /// Says how a tensor that is no argument of the model lies, e.g. targets of a loss outside it.
  /// Collective: sizes along cut dimensions are exchanged. Errors: LayoutError for parts that are
  /// no balanced cut.
  void set_layout(const at::Tensor& tensor, const layout::Layout& layout, const std::string& name);
  /// Compares what is left. Collective: all ranks. Errors: LayoutError; PeerFailure; CommError.
  void finish();
  /// Tells the other ranks that this one leaves by an error of its own, other than a LayoutError
  /// (which all know) or a CommError: they end at their next meeting with PeerFailure instead of
  /// waiting for this rank. Blocks until they meet. Returns whether they know: not if a finding has
  /// ended the validation already.
  bool tell_failure(ErrorCode code, const std::string& text) noexcept;
  ValidationCounts counts() const;

 private:
  class Validator;
  std::unique_ptr<Validator> validator_;
};

}  // namespace hypershard::plan
