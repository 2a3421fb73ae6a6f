// Operators on lists of tensors: the joined dimension must be whole, or pieces would interleave.
#include <algorithm>

#include "hypershard/dtensor/rules/dim_building.h"
#include "hypershard/dtensor/rules/families.h"

namespace hypershard::dtensor::rules {
namespace {

/// `[0]` joins with tensors of any shape; torch has kept that from its beginnings.
bool is_skipped(const RuleCall& call, int operand) {
  return call.rank(operand) == 1 && call.shape(operand)[0] == 0;
}

DimMap cat_along(const RuleCall& call, int dim) {
  DimMap map = whole_map(call);
  const std::vector<int> operands = call.operand_list("tensors");
  int first = operands[0];
  for (const int operand : operands) {
    first = is_skipped(call, first) ? operand : first;
    map.terms.push_back({operand});
  }
  const int rank = call.rank(first);
  dim = dim < 0 ? dim + rank : dim;
  const int joined[] = {dim};
  Dims dims = label_all(map, call, first, joined);
  std::int64_t size = 0;
  for (const int operand : operands) {
    if (call.rank(operand) != rank) {
      continue;
    }
    for (int i = 0; i < rank; ++i) {
      if (i != dim) {
        share_dim(map, operand, i, dims[at(i)]);
      }
    }
    size += call.shape(operand)[at(dim)];
  }
  dims[at(dim)].size = size;
  map.outputs = {{std::move(dims)}};
  map.passes = kMoves;
  return map;
}

DimMap cat(const RuleCall& call) {
  return cat_along(call, static_cast<int>(call.integer("dim")));
}

DimMap stack(const RuleCall& call) {
  DimMap map = whole_map(call);
  const std::vector<int> operands = call.operand_list("tensors");
  Dims dims = label_all(map, call, operands[0]);
  for (const int operand : operands) {
    for (int i = 0; i < call.rank(operand); ++i) {
      share_dim(map, operand, i, dims[at(i)]);
    }
    map.terms.push_back({operand});
  }
  dims.insert(
      dims.begin() + call.dim("dim", call.rank(0) + 1),
      Dim::whole(static_cast<std::int64_t>(operands.size()))
  );
  map.outputs = {{std::move(dims)}};
  map.passes = kMoves;
  return map;
}

DimMap hstack(const RuleCall& call) {
  return cat_along(call, call.rank(0) == 1 ? 0 : 1);
}

DimMap vstack(const RuleCall& call) {
  if (call.rank(0) < 2) {
    DimMap map = whole_map(call);
    Dims dims = {Dim::whole(call.num_operands()), label_dim(map, 0, 0)};
    for (int i = 0; i < call.num_operands(); ++i) {
      share_dim(map, i, 0, dims[1]);
      map.terms.push_back({i});
    }
    map.outputs = {{std::move(dims)}};
    map.passes = kMoves;
    return map;
  }
  return cat_along(call, 0);
}

DimMap meshgrid(const RuleCall& call) {
  DimMap map = whole_map(call);
  const std::vector<int> operands = call.operand_list("tensors");
  Dims dims;
  for (const int operand : operands) {
    dims.push_back(call.rank(operand) == 1 ? label_dim(map, operand, 0) : Dim::whole(1));
  }
  if (call.has("indexing") && call.text("indexing") == "xy" && dims.size() > 1) {
    std::swap(dims[0], dims[1]);
  }
  for (const int operand : operands) {
    map.outputs.push_back({.dims = dims, .is_defined = true, .from = {operand}});
  }
  return map;
}

DimMap broadcast_tensors(const RuleCall& call) {
  DimMap map = whole_map(call);
  const std::vector<int> operands = call.operand_list("tensors");
  const Dims dims = broadcast(map, call, operands);
  map.outputs.assign(operands.size(), {dims});
  return map;
}

}  // namespace

void add_joining(internal::RuleRegistry& registry) {
  const auto add = [&](const char* name, OpRule rule) {
    registry.add(std::string("aten::") + name, "joining", std::move(rule));
  };
  for (const char* name : {"cat", "concat", "concatenate"}) {
    add(name, cat);
  }
  add("stack", stack);
  add("hstack", hstack);
  add("vstack", vstack);
  add("meshgrid", meshgrid);
  add("broadcast_tensors", broadcast_tensors);
}

}  // namespace hypershard::dtensor::rules
