// The built-in rules, one function a family.
#pragma once

#include "hypershard/dtensor/internal/rule_registry.h"

namespace hypershard::dtensor::rules {

void add_attention(internal::RuleRegistry& registry);
void add_backward(internal::RuleRegistry& registry);
void add_contractions(internal::RuleRegistry& registry);
void add_convolutions(internal::RuleRegistry& registry);
void add_indexing(internal::RuleRegistry& registry);
void add_joining(internal::RuleRegistry& registry);
void add_losses(internal::RuleRegistry& registry);
void add_making(internal::RuleRegistry& registry);
void add_normalisation(internal::RuleRegistry& registry);
void add_padding(internal::RuleRegistry& registry);
void add_pointwise(internal::RuleRegistry& registry);
void add_pooling(internal::RuleRegistry& registry);
void add_reductions(internal::RuleRegistry& registry);
void add_reshaping(internal::RuleRegistry& registry);
void add_sorting(internal::RuleRegistry& registry);
void add_views(internal::RuleRegistry& registry);

inline void add_all(internal::RuleRegistry& registry) {
  add_attention(registry);
  add_backward(registry);
  add_contractions(registry);
  add_convolutions(registry);
  add_indexing(registry);
  add_joining(registry);
  add_losses(registry);
  add_making(registry);
  add_normalisation(registry);
  add_padding(registry);
  add_pointwise(registry);
  add_pooling(registry);
  add_reductions(registry);
  add_reshaping(registry);
  add_sorting(registry);
  add_views(registry);
}

}  // namespace hypershard::dtensor::rules
