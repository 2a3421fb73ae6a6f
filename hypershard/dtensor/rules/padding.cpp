// Padding: padded dimensions must be whole, a piece's edge is not the whole's.
#include "hypershard/dtensor/rules/dim_building.h"
#include "hypershard/dtensor/rules/families.h"

namespace hypershard::dtensor::rules {
namespace {

/// `padding` lists (front, back) from the last dimension to the first.
DimMap padded(const RuleCall& call, const std::vector<std::int64_t>& padding, bool is_linear) {
  DimMap map = whole_map(call);
  Dims dims(at(call.rank(0)));
  for (int dim = 0; dim < call.rank(0); ++dim) {
    const std::size_t pair = 2 * at(call.rank(0) - 1 - dim);
    const std::int64_t added = pair + 1 < padding.size() ? padding[pair] + padding[pair + 1] : 0;
    const bool is_free =
        pair + 1 >= padding.size() || (padding[pair] == 0 && padding[pair + 1] == 0);
    dims[at(dim)] = is_free ? label_dim(map, 0, dim) : Dim::whole(call.shape(0)[at(dim)] + added);
  }
  map.outputs = {{std::move(dims)}};
  if (is_linear) {
    linear(map, 0);
  }
  return map;
}

DimMap pad(const RuleCall& call) {
  const bool has_constant = call.find("mode") == nullptr || call.text("mode") == "constant";
  const bool is_zero = !call.has("value") || call.number("value") == 0.0;
  return padded(call, call.integers("pad"), !has_constant || is_zero);
}

DimMap pad_by_edge(const RuleCall& call) {
  DimMap map = padded(call, call.integers("padding"), true);
  map.takes_empty = false;
  return map;
}

}  // namespace

void add_padding(internal::RuleRegistry& registry) {
  const auto add = [&](const char* name, OpRule rule) {
    registry.add(std::string("aten::") + name, "padding", std::move(rule));
  };
  add("pad", pad);
  add("constant_pad_nd", pad);
  for (const char* name :
       {"reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d"}) {
    add(name, pad_by_edge);
  }
}

}  // namespace hypershard::dtensor::rules
