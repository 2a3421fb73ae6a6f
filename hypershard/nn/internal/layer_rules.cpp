// Each rule says which dimensions run over one index; see hypershard/dtensor/dim_map.h.
#include "hypershard/nn/internal/layer_rules.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include <ATen/core/ivalue.h>

#include "hypershard/core/text.h"
#include "hypershard/nn/row_part.h"

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

DimMap cross_entropy_part_forward_rule(const RuleCall& call) {
  const auto part = call.find("part")->toCustomClass<RowPart>();
  const auto& placements = call.spec(0).layout.placements;
  for (std::size_t axis = 0; axis < placements.size(); ++axis) {
    const bool is_known =
        std::find(part->axes.begin(), part->axes.end(), static_cast<int>(axis)) != part->axes.end();
    const bool is_cut = placements[axis] == layout::Placement::shard(1);
    if (is_known != is_cut && call.mesh().axes()[axis].size > 1) {
      return dtensor::refuse(
          concat_text(
              "classes of 'logits' ",
              call.shape(0),
              is_cut ? " are cut on axis " : " are whole on axis ",
              call.mesh().axes()[axis].name,
              is_known ? ", on which the projection's rows are cut"
                       : ", on which the projection's rows are whole"
          ),
          "let the logits lie as the rows of the weight that they come from: Shard(-1) where those "
          "are Shard(0)"
      );
    }
  }
  DimMap map;
  const Dim rows = Dim::of(map.new_label(Reduction::kMean));
  const Dim classes = Dim::of(map.new_label(Reduction::kInside));
  map.operands = {{{rows, classes}}, {{rows}}};
  map.outputs = {{Dims{}}, {{rows}}};
  return map;
}

DimMap embedding_forward_rule(const RuleCall& call) {
  DimMap map;
  Dims result = labels(map, call.rank(1));
  const Dims indices = result;
  const Dim dim = Dim::of(map.new_label());
  const Dim rows = call.has("first_row") ? Dim::of(map.new_label(Reduction::kSum)) : Dim::whole();
  result.push_back(dim);
  map.operands = {{{rows, dim}}, {indices}};
  map.outputs = {{result}};
  map.terms = {{0}};
  return map;
}

DimMap fast_linear_rule(const RuleCall& call) {
  if (call.text("attr") != "none") {
    return dtensor::refuse(
        concat_text("'attr' is ", call.text("attr"), ", which is not linear"),
        "use aten::linear and the function's own operator"
    );
  }
  DimMap map;
  const Dims rows = labels(map, call.rank(0) - 1);
  const Dim in = Dim::of(map.new_label(Reduction::kSum));
  const Dim out = Dim::of(map.new_label());
  map.operands = {{with(rows, in)}, {{out, in}}};
  map.outputs = {{with(rows, out)}};
  map.terms = {{0, 1}};
  if (call.num_operands() == 3) {
    map.operands.push_back({{out}});
    map.terms.push_back({2});
  }
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
