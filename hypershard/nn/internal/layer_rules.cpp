// Each rule says which dimensions run over one index; see hypershard/dtensor/dim_map.h.
#include "hypershard/nn/internal/layer_rules.h"

#include <utility>

namespace hypershard::nn::internal {
namespace {

using dtensor::Dim;
using dtensor::DimMap;
using dtensor::Dims;
using dtensor::Reduction;
using dtensor::RuleCall;

/// `count` new labels.
Dims labels(DimMap& map, int count, Reduction reduction = Reduction::kRefused) {
  Dims dims;
  for (int i = 0; i < count; ++i) {
    dims.push_back(Dim::of(map.new_label(reduction)));
  }
  return dims;
}

Dims with(Dims dims, const Dim& last) {
  dims.push_back(last);
  return dims;
}

}  // namespace

DimMap attention_forward_rule(const RuleCall& call) {
  const std::int64_t positions = call.shape(0)[1];
  const std::int64_t width = call.shape(0)[3];
  const std::int64_t key_heads = call.shape(1)[2];
  if (key_heads == 0 || call.shape(0)[2] % key_heads != 0) {
    return dtensor::refuse(
        "heads of queries are no multiple of those of keys", "check the heads of the projections"
    );
  }
  DimMap map;
  const Dims free = labels(map, 2);
  const Dim batch = free[0];
  const Dim keys = free[1];
  const Dim queries = Dim::of(keys.label, call.shape(0)[2] / key_heads);
  map.operands = {
      {{batch, Dim::whole(), queries, Dim::whole()}},
      {{batch, Dim::whole(), keys, Dim::whole()}},
      {{batch, Dim::whole(), keys, Dim::whole()}}
  };
  map.outputs = {
      {{batch, Dim::whole(positions), queries, Dim::whole(width)}},
      {.dims = {batch, queries, Dim::whole(positions)}, .is_defined = true, .from = {0, 1}}
  };
  map.terms = {{2}};
  return map;
}

DimMap cross_entropy_forward_rule(const RuleCall&) {
  DimMap map;
  const Dims rows = labels(map, 1, Reduction::kMean);
  map.operands = {{with(rows, Dim::whole())}, {rows}};
  map.outputs = {{Dims{}}, {rows}};
  return map;
}

DimMap rms_norm_forward_rule(const RuleCall& call) {
  DimMap map;
  const Dims rows = labels(map, call.rank(0) - 1);
  map.operands = {{with(rows, Dim::whole())}, {{Dim::whole()}}};
  map.outputs = {
      {with(rows, Dim::whole(call.shape(0).back()))},
      {.dims = rows, .is_defined = true, .from = {0}}
  };
  map.terms = {{1}};
  return map;
}

DimMap rotate_rule(const RuleCall& call) {
  DimMap map;
  const Dims free = labels(map, 3);  // batch, positions, heads
  const Dims table = {free[1], Dim::whole()};
  map.operands = {{with(free, Dim::whole())}, {table}, {table}};
  map.outputs = {{with(free, Dim::whole(call.shape(0)[3]))}};
  map.terms = {{0}};
  return map;
}

DimMap swiglu_forward_rule(const RuleCall& call) {
  DimMap map;
  const Dims dims = labels(map, call.rank(0));
  map.operands = {{dims}, {dims}};
  map.outputs = {{dims}};
  map.terms = {{1}};
  return map;
}

}  // namespace hypershard::nn::internal
