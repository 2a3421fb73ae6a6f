// Sorting, ranking and running sums: whole along their dimension, free in the others.
#include "hypershard/dtensor/rules/dim_building.h"
#include "hypershard/dtensor/rules/families.h"

namespace hypershard::dtensor::rules {
namespace {

DimMap along_dim(const RuleCall& call, int dim, int num_outputs) {
  DimMap map = whole_map(call);
  const int whole[] = {dim};
  map.outputs.assign(at(num_outputs), {label_all(map, call, 0, whole)});
  return map;
}

template <int kNumOutputs>
DimMap sort(const RuleCall& call) {
  return along_dim(call, call.dim("dim", call.rank(0)), kNumOutputs);
}

DimMap topk(const RuleCall& call) {
  const int dim = call.dim("dim", call.rank(0));
  DimMap map = along_dim(call, dim, 2);
  for (OutputMap& output : map.outputs) {
    if (!output.dims.empty()) {
      output.dims[at(dim)].size = call.integer("k");
    }
  }
  return map;
}

/// kthvalue, median, mode: one entry is left of the dimension.
DimMap pick_one(const RuleCall& call) {
  if (call.find("dim") == nullptr) {
    DimMap map = whole_map(call);
    map.outputs = {{{}}};
    return map;
  }
  const int dim = call.dim("dim", call.rank(0));
  DimMap map = along_dim(call, dim, 2);
  for (OutputMap& output : map.outputs) {
    if (call.flag("keepdim") && !output.dims.empty()) {
      output.dims[at(dim)].size = 1;
    } else if (!output.dims.empty()) {
      output.dims.erase(output.dims.begin() + dim);
    }
  }
  return map;
}

DimMap cumsum(const RuleCall& call) {
  DimMap map = sort<1>(call);
  if (casts_linearly(call, 0)) {
    linear(map, 0);
  }
  return map;
}

DimMap diff(const RuleCall& call) {
  if (call.num_operands() > 1) {
    return refuse("joins tensors to its operand", "cat before");
  }
  const int dim = call.dim("dim", call.rank(0));
  DimMap map = along_dim(call, dim, 1);
  std::int64_t& size = map.outputs[0].dims[at(dim)].size;
  size = size > call.integer("n") ? size - call.integer("n") : 0;
  linear(map, 0);
  return map;
}

}  // namespace

void add_sorting(internal::RuleRegistry& registry) {
  const auto add = [&](const char* name, OpRule rule) {
    registry.add(std::string("aten::") + name, "sorting and scans", std::move(rule));
  };
  add("sort", sort<2>);
  add("argsort", sort<1>);
  add("msort", [](const RuleCall& call) { return along_dim(call, 0, 1); });
  add("topk", topk);
  for (const char* name : {"kthvalue", "median", "mode"}) {
    add(name, pick_one);
  }
  add("cumsum", cumsum);
  add("cumprod", sort<1>);
  add("logcumsumexp", sort<1>);
  add("cummax", sort<2>);
  add("cummin", sort<2>);
  add("diff", diff);
}

}  // namespace hypershard::dtensor::rules
