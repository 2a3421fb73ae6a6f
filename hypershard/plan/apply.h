// Production mode: parameters cut to this rank's part, boundaries compiled and installed at exactly
// the modules that the plan names. Between boundaries nothing of ours runs.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/comm/world.h"
#include "hypershard/plan/resolve.h"
#include "hypershard/plan/resolved_plan.h"

namespace torch::nn {
class Module;
}

namespace hypershard::plan {

/// How a resolved plan is installed.
struct ApplyOptions {
  /// Reduce gradients that are Partial on the plan's axes by a hook on the parameter, before the
  /// gradient is accumulated. False: whoever owns the gradients reduces over
  /// ResolvedParameter::reduce_axes, such as fully_shard (plan/parameter_specs.h).
  bool reduce_gradients = true;
  /// Install a plan whose problems were collected. It computes something else than the model.
  bool allow_problems = false;
};

/// What crosses a boundary, told to validation.
class BoundaryObserver {
 public:
  virtual ~BoundaryObserver() = default;
  /// Called before the boundary's collectives; may throw.
  virtual void before_boundary(const ResolvedBoundary& boundary, const at::Tensor& arriving) = 0;
  /// Called after them. `result` is what the program goes on with.
  virtual void after_boundary(
      const ResolvedBoundary& boundary, const at::Tensor& arriving, const at::Tensor& result
  ) = 0;
  /// Called in backward with the gradient as it arrives at the boundary.
  virtual void before_gradient(const ResolvedBoundary& boundary, const at::Tensor& gradient) = 0;
  /// Called before a parameter's gradient is reduced.
  virtual void before_reduction(const ResolvedParameter& parameter, const at::Tensor& gradient) = 0;
};

/// Sets the calling thread's observer of boundaries, null for none; returns the one before.
/// A boundary costs one thread-local read while there is none.
BoundaryObserver* set_boundary_observer(BoundaryObserver* observer);

/// A plan in force on a model. Copies share it; the hooks go with the last copy or `remove()`.
/// Parameters keep their local parts; with the last copy layers forget which rows these are
/// (nn/row_part.h). The model must outlive it. Threads: the model's thread.
class AppliedPlan {
 public:
  const ResolvedPlan& resolved() const;
  const std::shared_ptr<const comm::ProcessMesh>& mesh() const;
  /// Counts the modules that carry hooks; boundaries with nothing to do carry none.
  std::size_t num_hooked_modules() const;
  /// Counts the shapes for which collectives are compiled, over all boundaries: other sizes that
  /// come add to it up to a few a boundary.
  std::size_t num_compiled_shapes() const;
  /// Takes all hooks away. No error if done before.
  void remove();

  /// Returns a parameter's full value (`gradient` false) or full gradient, undefined if it has
  /// none. Collective: all ranks of the mesh. Errors: InvalidArgument for an unknown name.
  at::Tensor full_parameter(const std::string& name, bool gradient = false) const;

 private:
  friend AppliedPlan
  apply_plan(torch::nn::Module&, ResolvedPlan, std::shared_ptr<const comm::ProcessMesh>, const ApplyOptions&);
  struct State;
  std::shared_ptr<State> state_;
};

/// Installs a resolved plan: cuts the parameters (values or meta; of values every rank holds the
/// whole, equal on all), compiles boundaries, adds hooks.
///
/// Run it under no guard. The parameters stay the modules' tensors, so optimizers made before or
/// after see the parts. The plan is in force while the result, or a copy of it, lives: keep it.
/// Collective: all ranks of the mesh.
/// Errors: InvalidArgument if the plan has problems, the model other parameters or shapes than the
/// resolved one, or a mesh of other axes.
[[nodiscard]] AppliedPlan apply_plan(
    torch::nn::Module& model,
    ResolvedPlan resolved,
    std::shared_ptr<const comm::ProcessMesh> mesh,
    const ApplyOptions& options = {}
);

/// Resolves and installs. Collective. Errors: as resolve and apply_plan.
[[nodiscard]] AppliedPlan apply_plan(
    torch::nn::Module& model,
    const ShardingPlan& plan,
    std::shared_ptr<const comm::ProcessMesh> mesh,
    const std::vector<PlannedInput>& inputs,
    const ForwardRun& forward,
    const ResolveOptions& resolve_options = {},
    const ApplyOptions& options = {}
);

}  // namespace hypershard::plan
