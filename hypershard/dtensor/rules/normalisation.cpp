// Softmax, and layer, RMS, group and batch norm: what is normalised together must be whole.
#include <algorithm>

#include "hypershard/dtensor/rules/dim_building.h"
#include "hypershard/dtensor/rules/families.h"

namespace hypershard::dtensor::rules {
namespace {

DimMap softmax(const RuleCall& call) {
  DimMap map = whole_map(call);
  const int whole[] = {call.dim("dim", call.rank(0))};
  Dims dims = label_all(map, call, 0, whole);
  map.outputs = {{std::move(dims)}};
  return map;
}

/// Statistics of layer norm have size 1 in the normalised dimensions.
DimMap layer_norm(const RuleCall& call, int num_statistics) {
  DimMap map = whole_map(call);
  const int num_normalised = static_cast<int>(call.integers("normalized_shape").size());
  Dims dims;
  Dims statistics;
  for (int dim = 0; dim < call.rank(0); ++dim) {
    const bool is_free = dim < call.rank(0) - num_normalised;
    dims.push_back(is_free ? label_dim(map, 0, dim) : Dim::whole(call.shape(0)[at(dim)]));
    statistics.push_back(is_free ? dims.back() : Dim::whole(1));
  }
  map.outputs = {{std::move(dims)}};
  for (int i = 0; i < num_statistics; ++i) {
    map.outputs.push_back({statistics});
  }
  return map;
}

/// Groups may be cut, a group may not; the call's number of groups is this rank's own.
struct Groups {
  Dim channels;
  std::int64_t block = 1;
};
Groups label_groups(DimMap& map, const RuleCall& call, std::int64_t local_groups) {
  Groups groups;
  groups.block =
      std::max<std::int64_t>(call.local_shape(0)[1] / std::max<std::int64_t>(local_groups, 1), 1);
  groups.channels = Dim::of(map.new_label(), groups.block);
  share_dim(map, 0, 1, groups.channels);
  for (const char* name : {"weight", "bias"}) {
    if (const int operand = call.operand(name); operand >= 0) {
      share_dim(map, operand, 0, groups.channels);
    }
  }
  return groups;
}

DimMap group_norm(const RuleCall& call) {
  DimMap map = whole_map(call);
  const bool is_native = call.find("group") != nullptr;
  const Groups groups = label_groups(map, call, call.integer(is_native ? "group" : "num_groups"));
  Dims dims = {label_dim(map, 0, 0), groups.channels};
  for (int dim = 2; dim < call.rank(0); ++dim) {
    dims.push_back(Dim::whole(call.shape(0)[at(dim)]));
  }
  const Dims statistics = {dims[0], Dim::of(groups.channels.label)};
  map.outputs = {{std::move(dims)}};
  if (is_native) {
    map.outputs.push_back({statistics});
    map.outputs.push_back({statistics});
  }
  return map;
}

/// In training the batch and the image are normalised together; in evaluation each entry alone.
DimMap batch_norm(const RuleCall& call, bool tells_statistics) {
  DimMap map = whole_map(call);
  const bool is_training = call.flag("training");
  Dims dims;
  for (int dim = 0; dim < call.rank(0); ++dim) {
    const bool is_free = dim == 1 || !is_training;
    dims.push_back(is_free ? label_dim(map, 0, dim) : Dim::whole(call.shape(0)[at(dim)]));
  }
  for (const char* name : {"weight", "bias", "running_mean", "running_var"}) {
    if (const int operand = call.operand(name); operand >= 0) {
      share_dim(map, operand, 0, dims[1]);
    }
  }
  const Dim channel = dims[1];
  map.outputs = {{std::move(dims)}};
  map.takes_empty = false;
  for (int i = 0; tells_statistics && i < 2; ++i) {
    map.outputs.push_back({{is_training ? channel : Dim::whole(0)}});
  }
  return map;
}

/// Each image and channel alone, when it uses the input's own statistics.
DimMap instance_norm(const RuleCall& call) {
  DimMap map = whole_map(call);
  const bool is_own = call.flag("use_input_stats") && !call.has("running_mean");
  Dims dims;
  for (int dim = 0; dim < call.rank(0); ++dim) {
    const bool is_free = dim == 1 || (dim == 0 && is_own);
    dims.push_back(is_free ? label_dim(map, 0, dim) : Dim::whole(call.shape(0)[at(dim)]));
  }
  for (const char* name : {"weight", "bias", "running_mean", "running_var"}) {
    if (const int operand = call.operand(name); operand >= 0) {
      share_dim(map, operand, 0, dims[1]);
    }
  }
  map.outputs = {{std::move(dims)}};
  map.takes_empty = false;
  return map;
}

}  // namespace

void add_normalisation(internal::RuleRegistry& registry) {
  const auto add = [&](const char* name, OpRule rule) {
    registry.add(std::string("aten::") + name, "normalisation", std::move(rule));
  };
  for (const char* name : {"softmax", "_softmax", "log_softmax", "_log_softmax"}) {
    add(name, softmax);
  }
  add("layer_norm", [](const RuleCall& call) { return layer_norm(call, 0); });
  add("native_layer_norm", [](const RuleCall& call) { return layer_norm(call, 2); });
  add("rms_norm", [](const RuleCall& call) { return layer_norm(call, 0); });
  add("_fused_rms_norm", [](const RuleCall& call) { return layer_norm(call, 1); });
  add("group_norm", group_norm);
  add("native_group_norm", group_norm);
  add("batch_norm", [](const RuleCall& call) { return batch_norm(call, false); });
  add("native_batch_norm", [](const RuleCall& call) { return batch_norm(call, true); });
  add("instance_norm", instance_norm);
}

}  // namespace hypershard::dtensor::rules
