// Draws of sizes and tensors.
#include "hypershard/dtensor/internal/property/rule_case.h"

#include <ATen/ATen.h>

namespace hypershard::dtensor::property {

std::int64_t Draw::size() {
  constexpr std::int64_t kSizes[] = {1, 2, 3, 4, 4, 5, 6, 7, 8, 8};
  return chance(random, 0.03) ? 0 : kSizes[draw(random, 10)];
}

Sizes Draw::shape(int least_rank, int most_rank) {
  Sizes made(static_cast<std::size_t>(least_rank + draw(random, most_rank - least_rank + 1)));
  for (std::int64_t& entry : made) {
    entry = size();
  }
  return made;
}

Sizes Draw::beside(const Sizes& shape) {
  Sizes made = shape;
  for (std::int64_t& entry : made) {
    entry = chance(random, 0.2) ? 1 : entry;
  }
  if (!made.empty() && chance(random, 0.2)) {
    made.erase(made.begin());
  }
  return made;
}

at::Tensor Draw::real(const Sizes& shape, double least, double most) {
  at::Tensor made = at::empty(shape, at::kDouble);
  auto* entries = made.data_ptr<double>();
  std::uniform_real_distribution<double> uniform(least, most);
  for (std::int64_t i = 0; i < made.numel(); ++i) {
    entries[i] = uniform(random);
  }
  return made;
}

at::Tensor Draw::whole_numbers(const Sizes& shape, std::int64_t bound) {
  at::Tensor made = at::empty(shape, at::kLong);
  auto* entries = made.data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < made.numel(); ++i) {
    entries[i] = number(bound);
  }
  return made;
}

at::Tensor Draw::flags(const Sizes& shape) {
  return whole_numbers(shape, 2).to(at::kBool);
}

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
