// A plan laid over a model: which parameter lies how, and where the boundaries are.
// Everything a pattern can get wrong is found here, before anything runs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/layout/mesh.h"
#include "hypershard/layout/placement.h"
#include "hypershard/layout/tensor_spec.h"
#include "hypershard/nn/hooks.h"
#include "hypershard/plan/sharding_plan.h"

namespace torch::nn {
class Module;
}

namespace hypershard::plan {

/// A module and its path; the root's path is empty.
struct NamedModule {
  std::string path;
  torch::nn::Module* module = nullptr;
  nn::HookPoint* hooks = nullptr;  ///< null: the module cannot be hooked
};
/// Lists a model's modules, parents before children, in the order they were registered. A module
/// that is reached on several ways is listed once, by its first path.
std::vector<NamedModule> named_modules(torch::nn::Module& model);
/// Writes the path, or `(root)`.
std::string module_text(const std::string& path);

/// A parameter or buffer under all its names.
struct MatchedParameter {
  std::string name;                  ///< the first one met
  std::vector<std::string> aliases;  ///< of tied weights
  at::Tensor tensor;                 ///< the module's own handle
  layout::TensorSpec spec;           ///< global shape (as it lies in the model) and layout
  bool is_buffer = false;
};

/// Where the plan names what enters or leaves a module.
struct BoundarySite {
  std::string module = {};  ///< path
  RuleKind kind = RuleKind::kInput;
  int index = 0;
  std::vector<std::optional<layout::Placement>> wanted = {};  ///< by mesh axis; none: as it arrives
  std::string rule = {};  ///< the rule's text (the first one's, if several state different axes)
};
/// Writes like `output 0 of blocks.3.mlp`.
std::string to_text(const BoundarySite& site);

/// A plan's rules by the model's names.
struct MatchedPlan {
  std::vector<MatchedParameter> parameters;  ///< all of the model's, buffers included
  std::vector<BoundarySite> sites;           ///< in the order of modules, inputs first, by index
};

/// Lays `plan` over `model`, whose parameters have their global shapes (values or meta).
///
/// Errors: InvalidArgument for a pattern that matches nothing (names the nearest names), two rules
/// that disagree about one parameter or boundary and axis (names both; also the two names of a
/// tied weight), an unknown axis, a dimension that a parameter does not have, a module with a
/// boundary but without forward hooks.
MatchedPlan match_plan(
    const ShardingPlan& plan, torch::nn::Module& model, const layout::DeviceMesh& mesh
);

}  // namespace hypershard::plan
