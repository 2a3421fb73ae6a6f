// All families of calls, for the test of all built-in rules.
#include "hypershard/dtensor/internal/property/rule_case.h"

namespace hypershard::dtensor::property {

RuleCases all_rule_cases() {
  RuleCases cases;
  add_pointwise_cases(cases);
  add_reduction_cases(cases);
  add_view_cases(cases);
  add_contraction_cases(cases);
  add_index_cases(cases);
  add_network_cases(cases);
  add_image_cases(cases);
  add_loss_cases(cases);
  add_making_cases(cases);
  add_backward_cases(cases);
  return cases;
}

}  // namespace hypershard::dtensor::property
