// See parameter_specs.h.
#include "hypershard/plan/parameter_specs.h"

namespace hypershard::plan {

std::map<std::string, shard::ParameterSpec> parameter_specs(const ResolvedPlan& plan) {
  std::map<std::string, shard::ParameterSpec> specs;
  for (const ResolvedParameter& parameter : plan.parameters) {
    if (!parameter.is_buffer) {
      specs[parameter.name] = {.spec = parameter.spec, .reduce_axes = parameter.reduce_axes};
    }
  }
  return specs;
}

}  // namespace hypershard::plan
