// Reductions, over all dimensions or some: a cut index that is summed leaves Partial(sum), and so
// on for means, maxima and minima; what has no such reduction needs its dimensions whole.
#include "hypershard/dtensor/rules/dim_building.h"
#include "hypershard/dtensor/rules/families.h"

namespace hypershard::dtensor::rules {
namespace {

/// `dims` are reduced; `num_outputs` outputs have what is left.
DimMap reduce_dims(
    const RuleCall& call, std::span<const int> dims, Reduction reduction, int num_outputs = 1
) {
  DimMap map = whole_map(call);
  const bool keeps = call.flag("keepdim");
  Dims left;
  for (int dim = 0; dim < call.rank(0); ++dim) {
    if (!contains(dims, dim)) {
      left.push_back(label_dim(map, 0, dim));
      continue;
    }
    if (reduction != Reduction::kRefused) {
      label_dim(map, 0, dim, reduction);
    }
    if (keeps) {
      left.push_back(Dim::whole(1));
    }
  }
  map.outputs.assign(at(num_outputs), {left});
  return map;
}

DimMap sum(const RuleCall& call) {
  DimMap map = reduce_dims(call, call.dims("dim", call.rank(0)), Reduction::kSum);
  if (casts_linearly(call, 0)) {
    linear(map, 0);
  }
  return map;
}

DimMap mean(const RuleCall& call) {
  DimMap map = reduce_dims(call, call.dims("dim", call.rank(0)), Reduction::kMean);
  linear(map, 0);
  return map;
}

DimMap extremum(const RuleCall& call, bool is_max) {
  DimMap map =
      reduce_dims(call, call.dims("dim", call.rank(0)), is_max ? Reduction::kMax : Reduction::kMin);
  map.terms = {{0}};
  map.passes = {.sum = false, .max = is_max, .min = !is_max};
  return map;
}

/// `max(self)`, `max(self, other)` and `max(self, dim)`, which also tells where.
DimMap max_or_min(const RuleCall& call, bool is_max) {
  if (call.find("other") != nullptr) {
    DimMap map = whole_map(call);
    const int both[] = {0, 1};
    Dims dims = broadcast(map, call, both);
    map.outputs = {{std::move(dims)}};
    map.terms = {{0}, {1}};
    map.passes = {.sum = false, .max = is_max, .min = !is_max};
    return map;
  }
  if (call.find("dim") != nullptr) {
    return reduce_dims(call, call.dims("dim", call.rank(0)), Reduction::kRefused, 2);
  }
  return extremum(call, is_max);
}

/// Needs the reduced dimensions whole.
template <int kNumOutputs>
DimMap whole(const RuleCall& call) {
  return reduce_dims(call, call.dims("dim", call.rank(0)), Reduction::kRefused, kNumOutputs);
}

/// Counts and sums of what is not linear in the operand.
DimMap summed(const RuleCall& call) {
  return reduce_dims(call, call.dims("dim", call.rank(0)), Reduction::kSum);
}

DimMap cosine_similarity(const RuleCall& call) {
  DimMap map = whole_map(call);
  const int both[] = {0, 1};
  Dims dims = broadcast(map, call, both);
  const int gone = call.dim("dim", static_cast<int>(dims.size()));
  dims.erase(dims.begin() + gone);
  map.outputs = {{std::move(dims)}};
  return map;
}

}  // namespace

void add_reductions(internal::RuleRegistry& registry) {
  const auto add = [&](const char* name, OpRule rule) {
    registry.add(std::string("aten::") + name, "reductions", std::move(rule));
  };
  add("sum", sum);
  add("mean", mean);
  add("amax", [](const RuleCall& call) { return extremum(call, true); });
  add("amin", [](const RuleCall& call) { return extremum(call, false); });
  add("max", [](const RuleCall& call) { return max_or_min(call, true); });
  add("min", [](const RuleCall& call) { return max_or_min(call, false); });
  for (const char* name : {"nansum", "count_nonzero"}) {
    add(name, summed);
  }
  for (const char* name :
       {"prod",
        "any",
        "all",
        "var",
        "std",
        "norm",
        "linalg_vector_norm",
        "logsumexp",
        "argmax",
        "argmin"}) {
    add(name, whole<1>);
  }
  for (const char* name : {"var_mean", "std_mean", "aminmax"}) {
    add(name, whole<2>);
  }
  add("cosine_similarity", cosine_similarity);
}

}  // namespace hypershard::dtensor::rules
