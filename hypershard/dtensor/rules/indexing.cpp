// Operators that pick or place entries by number: the dimension that is numbered must be whole, for
// numbers mean the whole; the numbers themselves and the other dimensions may be cut.
#include <algorithm>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "hypershard/dtensor/rules/dim_building.h"
#include "hypershard/dtensor/rules/families.h"

namespace hypershard::dtensor::rules {
namespace {

DimMap embedding(const RuleCall& call) {
  DimMap map = whole_map(call);
  const int weight = call.operand("weight");
  Dims dims = label_all(map, call, call.operand("indices"));
  dims.push_back(label_dim(map, weight, 1));
  map.outputs = {{std::move(dims)}};
  moves(map, weight);
  return map;
}

DimMap index_select(const RuleCall& call) {
  DimMap map = whole_map(call);
  const int dim = call.dim("dim", call.rank(0));
  const int index = call.operand("index");
  const int picked[] = {dim};
  Dims dims = label_all(map, call, 0, picked);
  if (!dims.empty()) {
    dims[at(dim)] = call.rank(index) == 1 ? label_dim(map, index, 0) : Dim::whole(1);
  }
  map.outputs = {{std::move(dims)}};
  moves(map, 0);
  return map;
}

/// Labels the dimensions other than `dim` in which `index` has the size of `self`.
Dims label_numbers(DimMap& map, const RuleCall& call, int index, int dim) {
  Dims dims;
  for (int i = 0; i < call.rank(index); ++i) {
    const std::int64_t size = call.shape(index)[at(i)];
    if (i == dim) {
      dims.push_back(label_dim(map, index, i));
    } else if (call.shape(0)[at(i)] == size) {
      dims.push_back(label_dim(map, index, i));
      share_dim(map, 0, i, dims.back());
    } else {
      dims.push_back(Dim::whole(size));
    }
  }
  return dims;
}

DimMap gather(const RuleCall& call) {
  DimMap map = whole_map(call);
  const int index = call.operand("index");
  const int dim = call.dim("dim", call.rank(0));
  if (call.rank(0) != call.rank(index)) {
    map.outputs = {{Dims(at(call.rank(index)), Dim::whole(1))}};  // scalars among vectors
  } else {
    map.outputs = {{label_numbers(map, call, index, dim)}};
  }
  moves(map, 0);
  return map;
}

DimMap take_along_dim(const RuleCall& call) {
  DimMap map = whole_map(call);
  const int index = call.operand("indices");
  if (!call.has("dim")) {
    std::int64_t numel = 1;
    for (const std::int64_t size : call.shape(index)) {
      numel *= size;
    }
    map.outputs = {{{Dim::whole(numel)}}};
    return map;
  }
  const int dim = call.dim("dim", call.rank(0));
  Dims dims;
  for (int i = 0; i < call.rank(0); ++i) {
    const std::int64_t size = call.shape(0)[at(i)];
    const std::int64_t count = call.shape(index)[at(i)];
    if (i == dim || size == 1 || size == count) {
      dims.push_back(label_dim(map, index, i));
      if (i != dim && size == count) {
        share_dim(map, 0, i, dims.back());
      }
    } else {
      dims.push_back(label_dim(map, 0, i));  // the index is stretched
    }
  }
  map.outputs = {{std::move(dims)}};
  moves(map, 0);
  return map;
}

/// scatter, scatter_add: outputs like self; entries go anywhere along `dim`.
DimMap scatter(const RuleCall& call) {
  DimMap map = whole_map(call);
  const int dim = call.dim("dim", call.rank(0));
  const int index = call.operand("index");
  const int source = call.operand("src");
  Dims dims;
  for (int i = 0; i < call.rank(0); ++i) {
    const std::int64_t size = call.shape(0)[at(i)];
    const bool is_alike = i != dim && call.rank(index) == call.rank(0) &&
                          call.shape(index)[at(i)] == size &&
                          (source < 0 || call.shape(source)[at(i)] == size);
    if (!is_alike) {
      dims.push_back(Dim::whole(size));
      continue;
    }
    dims.push_back(label_dim(map, 0, i));
    share_dim(map, index, i, dims.back());
    if (source >= 0) {
      share_dim(map, source, i, dims.back());
    }
  }
  map.outputs = {{std::move(dims)}};
  if (!call.has("reduce")) {
    static const Terms kSum("self|src");
    static const Terms kValue("self|value");
    (source >= 0 ? kSum : kValue).apply(map, call);
  }
  return map;
}

/// index_add, index_copy and index_fill: whole slices are placed along `dim`.
DimMap place_slices(const RuleCall& call) {
  DimMap map = whole_map(call);
  const int dim = call.dim("dim", call.rank(0));
  const int source = call.operand("source");
  const int placed[] = {dim};
  Dims dims = label_all(map, call, 0, placed);
  for (int i = 0; source >= 0 && i < call.rank(source) && call.rank(source) == call.rank(0); ++i) {
    if (i != dim) {
      share_dim(map, source, i, dims[at(i)]);
    }
  }
  map.outputs = {{std::move(dims)}};
  static const Terms kSum("self|source");
  static const Terms kValue("self|value");
  (source >= 0 ? kSum : kValue).apply(map, call);
  return map;
}

bool is_mask(const RuleCall& call, int operand) {
  const auto type = call.tensor(operand).scalar_type();
  return type == at::kBool || type == at::kByte;
}

/// Where the picked dimensions of `self[i, j, :]` go: in place of the first one if the index
/// tensors are side by side, else in front.
std::size_t picked_position(const std::vector<int>& indices) {
  std::size_t first = 0;
  while (indices[first] < 0) {
    ++first;
  }
  std::size_t last = indices.size() - 1;
  while (indices[last] < 0) {
    --last;
  }
  for (std::size_t i = first; i <= last; ++i) {
    if (indices[i] < 0) {
      return 0;
    }
  }
  return first;
}

struct Picked {
  Dims numbers;  ///< broadcast dimensions of the index tensors
  Dims dims;     ///< all dimensions of `self[indices]`
};

/// `free_numbers`: the index tensors may be cut, not only the dimensions that are not indexed.
Picked pick(DimMap& map, const RuleCall& call, bool free_numbers) {
  std::vector<int> indices = call.operand_list("indices");
  Picked picked;
  std::vector<int> present;
  for (const int index : indices) {
    if (index >= 0) {
      present.push_back(index);
      if (is_mask(call, index)) {
        map.refusal = Refusal{
            concat_text(
                "the result's size depends on the values of the mask '",
                call.operand_name(index),
                "'"
            ),
            "use where, masked_fill or topk"
        };
        return picked;
      }
    }
  }
  if (present.empty()) {
    picked.dims = label_all(map, call, 0);
    return picked;
  }
  picked.numbers = broadcast(map, call, present);
  if (!free_numbers) {
    for (const int index : present) {
      map.operands[at(index)].dims.assign(at(call.rank(index)), Dim::whole());
    }
  }
  const std::size_t position = picked_position(indices);
  for (std::size_t dim = 0; dim < call.shape(0).size() + 1; ++dim) {
    if (dim == position) {
      picked.dims.insert(picked.dims.end(), picked.numbers.begin(), picked.numbers.end());
    }
    if (dim < call.shape(0).size() && (dim >= indices.size() || indices[dim] < 0)) {
      picked.dims.push_back(label_dim(map, 0, static_cast<int>(dim)));
    }
  }
  return picked;
}

DimMap index(const RuleCall& call) {
  DimMap map = whole_map(call);
  Picked picked = pick(map, call, true);
  map.outputs = {{std::move(picked.dims)}};
  moves(map, 0);
  return map;
}

DimMap index_put(const RuleCall& call) {
  DimMap map = whole_map(call);
  const Picked picked = pick(map, call, false);
  if (map.refusal) {
    return map;
  }
  const int values = call.operand("values");
  const int added = static_cast<int>(picked.dims.size()) - call.rank(values);
  Dims dims;
  for (int i = 0; i < call.rank(0); ++i) {
    const Dim& kept = map.operands[0].dims[at(i)];
    dims.push_back(kept.label == Dim::kWhole ? Dim::whole(call.shape(0)[at(i)]) : kept);
  }
  for (int i = 0; i < call.rank(values); ++i) {
    const Dim& slot = picked.dims[at(i + added)];
    const bool is_kept = std::any_of(dims.begin(), dims.end(), [&](const Dim& dim) {
      return dim.label == slot.label && dim.label != Dim::kWhole;
    });
    if (is_kept && call.shape(values)[at(i)] != 1) {
      share_dim(map, values, i, slot);
    }
  }
  map.outputs = {{std::move(dims)}};
  map.terms = {{0}, {values}};
  return map;
}

DimMap one_hot(const RuleCall& call) {
  if (call.integer("num_classes") < 0) {
    return refuse("the number of classes depends on values", "state num_classes");
  }
  DimMap map = whole_map(call);
  Dims dims = label_all(map, call, 0);
  dims.push_back(Dim::whole(call.integer("num_classes")));
  map.outputs = {{std::move(dims)}};
  return map;
}

DimMap depends_on_values(const RuleCall& call) {
  static_cast<void>(call);
  return refuse(
      "the result's size depends on values, which differ between pieces",
      "use where, topk or one_hot, whose sizes do not"
  );
}

}  // namespace

void add_indexing(internal::RuleRegistry& registry) {
  const auto add = [&](const char* name, OpRule rule) {
    registry.add(std::string("aten::") + name, "indexing", std::move(rule));
  };
  add("embedding", embedding);
  add("index_select", index_select);
  add("gather", gather);
  add("take_along_dim", take_along_dim);
  add("scatter", scatter);
  add("scatter_add", scatter);
  for (const char* name : {"index_add", "index_copy", "index_fill"}) {
    add(name, place_slices);
  }
  add("index", index);
  add("_unsafe_index", index);
  add("index_put", index_put);
  add("one_hot", one_hot);
  for (const char* name :
       {"nonzero", "masked_select", "masked_scatter", "unique_dim", "_unique2", "bincount"}) {
    registry.add(
        std::string("aten::") + name, "of sizes that depend on values", depends_on_values, false
    );
  }
}

}  // namespace hypershard::dtensor::rules
