// Operators that make tensors, from nothing, from another one's shape, from random numbers, or by
// copying. What is made from nothing is the same on every rank: Replicate.
#include <algorithm>
#include <cmath>
#include <numeric>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "hypershard/dtensor/rules/dim_building.h"
#include "hypershard/dtensor/rules/families.h"

namespace hypershard::dtensor::rules {
namespace {

Dims whole_dims(const std::vector<std::int64_t>& sizes) {
  Dims dims;
  for (const std::int64_t size : sizes) {
    dims.push_back(Dim::whole(size));
  }
  return dims;
}

/// Ignores its operands: they give a dtype at most.
DimMap from_nothing(const RuleCall& call, Dims dims, bool is_random = false) {
  DimMap map = whole_map(call);
  for (OperandMap& operand : map.operands) {
    operand.role = Role::kIgnored;
  }
  map.outputs = {{std::move(dims)}};
  map.is_random = is_random;
  return map;
}

DimMap sized(const RuleCall& call, bool is_random) {
  return from_nothing(call, whole_dims(call.integers("size")), is_random);
}

DimMap arange(const RuleCall& call) {
  const double start = call.has("start") ? call.number("start") : 0.0;
  const double step = call.has("step") ? call.number("step") : 1.0;
  const double length = std::ceil((call.number("end") - start) / step);
  return from_nothing(
      call, {Dim::whole(std::max<std::int64_t>(static_cast<std::int64_t>(length), 0))}
  );
}

DimMap linspace(const RuleCall& call) {
  return from_nothing(call, {Dim::whole(call.integer("steps"))});
}

DimMap eye(const RuleCall& call) {
  const std::int64_t rows = call.integer("n");
  return from_nothing(call, {Dim::whole(rows), Dim::whole(call.integer("m", rows))});
}

/// A tensor of the first operand's shape and cuts that does not read its values.
DimMap like(const RuleCall& call, bool is_random) {
  DimMap map = same_shape(call);
  map.operands[0].role = Role::kShape;
  map.is_random = is_random;
  return map;
}

/// Zeros: any number of zeros adds up to zero, so Partial stays Partial.
DimMap zeros_like(const RuleCall& call) {
  DimMap map = same_shape(call);
  linear(map, 0);
  return map;
}

DimMap fill(const RuleCall& call) {
  DimMap map = like(call, false);
  static const Terms kValue("value");
  if (call.operand("value") >= 0) {
    kValue.apply(map, call);
  }
  return map;
}

DimMap copy(const RuleCall& call) {
  DimMap map = same_shape(call);
  map.operands[0].role = Role::kShape;
  const int added = call.rank(0) - call.rank(1);
  for (int dim = 0; dim < call.rank(1); ++dim) {
    if (dim + added >= 0 && call.shape(1)[at(dim)] == call.shape(0)[at(dim + added)]) {
      share_dim(map, 1, dim, map.outputs[0].dims[at(dim + added)]);
    }
  }
  if (at::isFloatingType(call.tensor(0).scalar_type())) {
    moves(map, 1);
  }
  return map;
}

/// Casts and moves between devices. Sums of rounded terms round like other floating-point sums.
DimMap cast(const RuleCall& call) {
  DimMap map = same_shape(call);
  const int other = call.operand("other");
  if (other >= 0) {
    map.operands[at(other)].role = Role::kIgnored;
  }
  const bool keeps_values = casts_linearly(call, 0) &&
                            (other < 0 || at::isFloatingType(call.tensor(other).scalar_type()));
  if (keeps_values) {
    moves(map, 0);
  }
  return map;
}

DimMap dropout(const RuleCall& call) {
  DimMap map = same_shape(call);
  const bool is_on = !call.has("train") || call.flag("train");
  map.is_random = is_on;
  if (!is_on) {
    linear(map, 0);
  }
  if (call.name() == "aten::native_dropout") {
    map.outputs.push_back(map.outputs[0]);
    map.terms.clear();  // the mask is no term
  }
  return map;
}

DimMap bernoulli(const RuleCall& call) {
  DimMap map = whole_map(call);
  std::vector<int> all(at(call.num_operands()));
  std::iota(all.begin(), all.end(), 0);
  Dims dims = broadcast(map, call, all);
  map.outputs = {{std::move(dims)}};
  map.is_random = true;
  if (call.num_operands() > 1 || call.has("p")) {
    map.operands[0].role = Role::kShape;
  }
  return map;
}

DimMap multinomial(const RuleCall& call) {
  DimMap map = whole_map(call);
  const int whole[] = {call.rank(0) - 1};
  Dims dims = label_all(map, call, 0, whole);
  dims.back().size = call.integer("num_samples");
  map.outputs = {{std::move(dims)}};
  map.is_random = true;
  return map;
}

}  // namespace

void add_making(internal::RuleRegistry& registry) {
  const auto make = [&](const char* name, OpRule rule) {
    registry.add(std::string("aten::") + name, "from nothing", std::move(rule), false);
  };
  const auto add = [&](const char* name, OpRule rule) {
    registry.add(std::string("aten::") + name, "copies, fills and random", std::move(rule));
  };
  for (const char* name :
       {"zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty"}) {
    make(name, [](const RuleCall& call) { return sized(call, false); });
  }
  for (const char* name : {"rand", "randn", "randint"}) {
    make(name, [](const RuleCall& call) { return sized(call, true); });
  }
  make("arange", arange);
  make("linspace", linspace);
  make("eye", eye);
  make("scalar_tensor", [](const RuleCall& call) { return from_nothing(call, {}); });
  for (const char* name : {"ones_like", "full_like", "empty_like"}) {
    add(name, [](const RuleCall& call) { return like(call, false); });
  }
  for (const char* name :
       {"rand_like", "randn_like", "randint_like", "normal_", "uniform_", "random_", "exponential_"
       }) {
    add(name, [](const RuleCall& call) { return like(call, true); });
  }
  add("zeros_like", zeros_like);
  add("zero", zeros_like);
  add("fill", fill);
  add("copy", copy);
  for (const char* name : {"to", "_to_copy", "type_as"}) {
    add(name, cast);
  }
  for (const char* name : {"dropout", "native_dropout"}) {
    add(name, dropout);
  }
  add("bernoulli", bernoulli);
  add("multinomial", multinomial);
}

}  // namespace hypershard::dtensor::rules
