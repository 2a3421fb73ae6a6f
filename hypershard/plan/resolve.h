// From a plan to its boundaries: the model runs once with layouts carried along, so that what
// arrives at each boundary is found, not asserted.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/layout/mesh.h"
#include "hypershard/layout/tensor_spec.h"
#include "hypershard/plan/resolved_plan.h"
#include "hypershard/plan/sharding_plan.h"

namespace torch::nn {
class Module;
}

namespace hypershard::plan {

/// A tensor that the forward reads and that is not a parameter: this rank's part of it.
struct PlannedInput {
  at::Tensor local;
  layout::TensorSpec spec;
  std::string name = "input";
};

/// Returns the spec of a tensor of which every rank holds a part as large as `local`.
layout::TensorSpec even_spec(
    const at::Tensor& local, layout::Layout layout, const layout::DeviceMesh& mesh
);

/// Runs the model on the tensors of the PlannedInputs and returns what is differentiated: the loss,
/// or outputs whose gradients will come in the outputs' own layouts.
using ForwardRun = std::function<std::vector<at::Tensor>()>;

/// What to do with a plan that is wrong.
enum class OnProblem : std::uint8_t {
  kThrow,    ///< LayoutError at the first
  kCollect,  ///< go on with a guess and list them all in ResolvedPlan::problems
};

/// How a plan is resolved.
struct ResolveOptions {
  std::vector<std::string> data_axes = {
  };  ///< their Partial gradients are left to the data-parallel side
  OnProblem on_problem = OnProblem::kThrow;
  /// Run the unsharded model as well and compare every operator's global shape with its: finds
  /// sizes in the model's code that are global where they must be local. Costs a forward at global
  /// shapes, and its memory, unless the model is on the meta device.
  bool compare_with_plain = true;
};

/// Resolves `plan` for one rank by running `forward` once (and once unsharded, see the options). No
/// communication: what a boundary would receive is zeros.
///
/// The model has its parameters' global shapes; during the run they have their local ones, and zero
/// values. With meta parameters and inputs nothing is computed. Random states and buffers change as
/// in any forward.
/// Collective: no.
/// Errors: as match_plan; InvalidArgument for parameters that a plan cut before and a forward that
/// returns nothing; LayoutError naming module, operator or boundary, layouts, shapes and the
/// fix; InvalidArgument for a boundary index that a module does not have.
ResolvedPlan resolve(
    torch::nn::Module& model,
    const ShardingPlan& plan,
    const layout::DeviceMesh& mesh,
    int rank,
    const std::vector<PlannedInput>& inputs,
    const ForwardRun& forward,
    const ResolveOptions& options = {}
);

}  // namespace hypershard::plan
