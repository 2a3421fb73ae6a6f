// The property of a rule: what it accepts, gathered by its own verdict, is the plain result.
#pragma once

#include <string>

#include "hypershard/dtensor/internal/property/rule_case.h"
#include "hypershard/layout/mesh.h"

namespace hypershard::dtensor::property {

struct CheckResult {
  int accepted = 0;  ///< accepted with some operand or output not Replicate, and compared
  int partial = 0;   ///< of these, with a Partial operand
  int refused = 0;
  int written = 0;    ///< in-place forms that ran and were compared
  int filled = 0;     ///< out forms that wrote what the operator returned
  std::string fault;  ///< the first one; empty if there is none
};

/// Draws up to `num_draws` calls with random layouts and stops after `enough` accepted ones or a
/// fault.
CheckResult check_rule(
    const RuleCase& rule_case, const layout::DeviceMesh& mesh, int num_draws, int enough
);

}  // namespace hypershard::dtensor::property
