// Views by size, and operators that stretch or repeat dimensions.
#include <algorithm>

#include <ATen/core/ivalue.h>

#include "hypershard/dtensor/rules/dim_building.h"
#include "hypershard/dtensor/rules/families.h"
#include "hypershard/dtensor/rules/view_shape.h"

namespace hypershard::dtensor::rules {
namespace {

DimMap view(const RuleCall& call) {
  if (call.has("dtype")) {
    DimMap map = whole_map(call);
    Dims dims = label_all(map, call, 0);
    map.outputs = {{std::move(dims)}};
    return map;
  }
  return view_map(call, call.integers("size"));
}

DimMap reshape(const RuleCall& call) {
  return view_map(call, call.integers("shape"));
}

DimMap like_other(const RuleCall& call) {
  const auto sizes = call.local_shape(1);
  DimMap map = view_map(call, {sizes.begin(), sizes.end()});
  if (map.refusal) {
    return map;
  }
  map.operands[1].role = Role::kIgnored;
  for (int dim = 0; dim < call.rank(1); ++dim) {
    const std::int64_t size = global_size(map, call, map.outputs[0].dims[at(dim)]);
    if (size != call.shape(1)[at(dim)]) {
      return refuse(
          concat_text(
              "'",
              call.operand_name(1),
              "' has global shape ",
              call.shape(1),
              ", but on this rank's sizes the result's dimension ",
              dim,
              " has ",
              size
          ),
          concat_text(
              "redistribute '",
              call.operand_name(0),
              "' to cut what '",
              call.operand_name(1),
              "' cuts"
          )
      );
    }
  }
  return map;
}

std::vector<std::int64_t> local_sizes(const RuleCall& call) {
  const auto sizes = call.local_shape(0);
  return {sizes.begin(), sizes.end()};
}

DimMap flatten(const RuleCall& call) {
  const std::vector<std::int64_t> local = local_sizes(call);
  if (local.empty()) {
    return view_map(call, {1});
  }
  const int start = call.has("start_dim") ? call.dim("start_dim", call.rank(0)) : 0;
  const int end = call.has("end_dim") ? call.dim("end_dim", call.rank(0)) : call.rank(0) - 1;
  std::vector<std::int64_t> sizes;
  std::vector<Run> runs;
  for (int dim = 0; dim < call.rank(0);) {
    const int next = dim == start ? end + 1 : dim + 1;
    const int out = static_cast<int>(sizes.size());
    sizes.push_back(1);
    for (int i = dim; i < next; ++i) {
      sizes.back() *= local[at(i)];
    }
    runs.push_back({dim, next, out, out + 1});
    dim = next;
  }
  return view_map(call, std::move(sizes), std::move(runs));
}

DimMap unflatten(const RuleCall& call) {
  const int split_dim = call.dim("dim", call.rank(0));
  const std::vector<std::int64_t> split = call.integers("sizes");
  std::vector<std::int64_t> sizes;
  std::vector<Run> runs;
  for (int dim = 0; dim < call.rank(0); ++dim) {
    const int out = static_cast<int>(sizes.size());
    if (dim == split_dim) {
      sizes.insert(sizes.end(), split.begin(), split.end());
    } else {
      sizes.push_back(call.local_shape(0)[at(dim)]);
    }
    runs.push_back({dim, dim + 1, out, static_cast<int>(sizes.size())});
  }
  return view_map(call, std::move(sizes), std::move(runs));
}

DimMap expand(const RuleCall& call) {
  const std::vector<std::int64_t> sizes = call.integers("size");
  DimMap map = whole_map(call);
  const int added = static_cast<int>(sizes.size()) - call.rank(0);
  Dims dims;
  for (int i = 0; i < static_cast<int>(sizes.size()); ++i) {
    const int dim = i - added;
    const std::int64_t size = sizes[at(i)];
    const bool is_single = dim >= 0 && call.shape(0)[at(dim)] == 1;
    const bool is_kept =
        dim >= 0 && (size == -1 || (!is_single && size == call.local_shape(0)[at(dim)]));
    if (dim >= 0 && !is_kept && call.shape(0)[at(dim)] != 1) {
      return refuse(
          concat_text(
              "dimension ",
              dim,
              " of '",
              call.operand_name(0),
              "' ",
              call.shape(0),
              " (global shape) would be stretched to local size ",
              size
          ),
          "only dimensions of global size 1 can be stretched: redistribute to Replicate"
      );
    }
    dims.push_back(is_kept ? label_dim(map, 0, dim) : Dim::whole(size));
  }
  map.outputs = {{std::move(dims)}};
  moves(map, 0);
  return map;
}

DimMap expand_as(const RuleCall& call) {
  DimMap map = whole_map(call);
  const int both[] = {0, 1};
  Dims dims = broadcast(map, call, both);
  map.outputs = {{std::move(dims)}};
  map.operands[1].role = Role::kShape;
  moves(map, 0);
  return map;
}

DimMap repeat(const RuleCall& call) {
  std::vector<std::int64_t> repeats = call.integers(call.find("dims") ? "dims" : "repeats");
  DimMap map = whole_map(call);
  while (repeats.size() < call.shape(0).size()) {
    repeats.insert(repeats.begin(), 1);  // tile allows fewer
  }
  const int added = static_cast<int>(repeats.size()) - call.rank(0);
  Dims dims;
  for (int i = 0; i < static_cast<int>(repeats.size()); ++i) {
    const int dim = i - added;
    if (dim >= 0 && repeats[at(i)] == 1) {
      dims.push_back(label_dim(map, 0, dim));
    } else {
      dims.push_back(Dim::whole((dim >= 0 ? call.shape(0)[at(dim)] : 1) * repeats[at(i)]));
    }
  }
  map.outputs = {{std::move(dims)}};
  moves(map, 0);
  return map;
}

DimMap repeat_interleave(const RuleCall& call) {
  if (call.find("self") == nullptr || !call.find("repeats")->isInt()) {
    return refuse("the result's size depends on values", "repeat by one integer");
  }
  const std::int64_t repeats = call.integer("repeats");
  DimMap map = whole_map(call);
  if (!call.has("dim") && call.rank(0) != 1) {
    std::int64_t numel = 1;
    for (const std::int64_t size : call.shape(0)) {
      numel *= size;
    }
    map.outputs = {{{Dim::whole(numel * repeats)}}};
  } else {
    const int dim = call.has("dim") ? call.dim("dim", call.rank(0)) : 0;
    Dims dims = label_all(map, call, 0);
    dims[at(dim)].block = repeats;
    if (repeats == 0) {
      return refuse("nothing is left of the operand", "repeat at least once");
    }
    map.outputs = {{std::move(dims)}};
  }
  moves(map, 0);
  return map;
}

/// [..., C r², H, W] -> [..., C, H r, W r]: each new row belongs to one old row.
DimMap pixel_shuffle(const RuleCall& call) {
  const std::int64_t factor = call.integer("upscale_factor");
  DimMap map = whole_map(call);
  Dims dims = label_all(map, call, 0);
  const int channel = call.rank(0) - 3;
  map.operands[0].dims[at(channel)].block = factor * factor;
  dims[at(channel + 1)].block = factor;
  dims[at(channel + 2)].block = factor;
  map.outputs = {{std::move(dims)}};
  moves(map, 0);
  return map;
}

DimMap pixel_unshuffle(const RuleCall& call) {
  const std::int64_t factor = call.integer("downscale_factor");
  for (int dim = 0; dim < call.rank(0); ++dim) {
    if (call.piece_sizes(0, dim).least == 0) {
      return refuse("torch leaves empty pieces as they are", "redistribute to Replicate");
    }
  }
  DimMap map = whole_map(call);
  Dims dims = label_all(map, call, 0);
  const int channel = call.rank(0) - 3;
  dims[at(channel)].block = factor * factor;
  map.operands[0].dims[at(channel + 1)].block = factor;
  map.operands[0].dims[at(channel + 2)].block = factor;
  map.outputs = {{std::move(dims)}};
  moves(map, 0);
  return map;
}

}  // namespace

void add_reshaping(internal::RuleRegistry& registry) {
  const auto add = [&](const char* name, OpRule rule) {
    registry.add(std::string("aten::") + name, "views by size", std::move(rule));
  };
  add("view", view);
  add("_unsafe_view", view);
  add("reshape", reshape);
  add("view_as", like_other);
  add("reshape_as", like_other);
  add("flatten", flatten);
  add("ravel", flatten);
  add("unflatten", unflatten);
  add("expand", expand);
  add("broadcast_to", expand);
  add("expand_as", expand_as);
  add("repeat", repeat);
  add("tile", repeat);
  add("repeat_interleave", repeat_interleave);
  add("pixel_shuffle", pixel_shuffle);
  add("pixel_unshuffle", pixel_unshuffle);
}

}  // namespace hypershard::dtensor::rules
