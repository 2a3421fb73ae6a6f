// Operators that move, drop or repeat dimensions, or take parts of them: kept dimensions stay cut,
// dimensions that are taken apart must be whole. All of them pass Partial operands on.
#include <algorithm>

#include <ATen/core/ivalue.h>

#include "hypershard/dtensor/rules/dim_building.h"
#include "hypershard/dtensor/rules/families.h"

namespace hypershard::dtensor::rules {
namespace {

DimMap moved(DimMap map, Dims dims) {
  map.outputs = {{std::move(dims)}};
  moves(map, 0);
  return map;
}

DimMap same(const RuleCall& call) {
  DimMap map = whole_map(call);
  Dims dims = label_all(map, call, 0);
  return moved(std::move(map), std::move(dims));
}

DimMap swap(const RuleCall& call, std::string_view first, std::string_view second) {
  DimMap map = whole_map(call);
  Dims dims = label_all(map, call, 0);
  if (!dims.empty()) {
    std::swap(dims[at(call.dim(first, call.rank(0)))], dims[at(call.dim(second, call.rank(0)))]);
  }
  return moved(std::move(map), std::move(dims));
}

DimMap transpose_last(const RuleCall& call) {
  DimMap map = whole_map(call);
  Dims dims = label_all(map, call, 0);
  if (dims.size() >= 2) {
    std::swap(dims[dims.size() - 1], dims[dims.size() - 2]);
  }
  return moved(std::move(map), std::move(dims));
}

DimMap reverse_dims(const RuleCall& call) {
  DimMap map = whole_map(call);
  Dims dims = label_all(map, call, 0);
  std::reverse(dims.begin(), dims.end());
  return moved(std::move(map), std::move(dims));
}

DimMap permute(const RuleCall& call) {
  DimMap map = whole_map(call);
  const Dims from = label_all(map, call, 0);
  Dims dims;
  if (!from.empty()) {
    for (const int dim : call.dims("dims", call.rank(0))) {
      dims.push_back(from[at(dim)]);
    }
  }
  return moved(std::move(map), std::move(dims));
}

DimMap movedim(const RuleCall& call) {
  DimMap map = whole_map(call);
  const Dims from = label_all(map, call, 0);
  const std::vector<int> source = call.dims("source", call.rank(0));
  const std::vector<int> destination = call.dims("destination", call.rank(0));
  std::vector<int> order(from.size(), -1);
  for (std::size_t i = 0; i < source.size() && i < destination.size(); ++i) {
    order[at(destination[i])] = source[i];
  }
  int next = 0;
  for (int& entry : order) {
    while (entry < 0 && contains(source, next)) {
      ++next;
    }
    entry = entry < 0 ? next++ : entry;
  }
  Dims dims;
  for (const int dim : order) {
    dims.push_back(from[at(dim)]);
  }
  return moved(std::move(map), std::move(dims));
}

DimMap unsqueeze(const RuleCall& call) {
  DimMap map = whole_map(call);
  Dims dims = label_all(map, call, 0);
  dims.insert(dims.begin() + call.dim("dim", call.rank(0) + 1), Dim::whole(1));
  return moved(std::move(map), std::move(dims));
}

DimMap squeeze(const RuleCall& call) {
  DimMap map = whole_map(call);
  std::vector<int> candidates;
  const bool is_some = call.find("dim") != nullptr;
  const bool is_none = is_some && call.integers("dim").empty();
  if (!is_none) {
    candidates =
        is_some ? call.dims("dim", std::max(call.rank(0), 1)) : call.dims("none", call.rank(0));
  }
  Dims dims;
  for (int dim = 0; dim < call.rank(0); ++dim) {
    const bool is_named = contains(candidates, dim);
    if (is_named && call.shape(0)[at(dim)] == 1) {
      continue;
    }
    const RuleCall::Sizes sizes = call.piece_sizes(0, dim);
    if (is_named && sizes.least <= 1 && sizes.most >= 1) {
      return refuse(
          concat_text(
              "dimension ",
              dim,
              " of '",
              call.operand_name(0),
              "' ",
              call.shape(0),
              " is cut into pieces of 1, which would be dropped although the whole has ",
              call.shape(0)[at(dim)]
          ),
          "name the dimensions to drop"
      );
    }
    dims.push_back(label_dim(map, 0, dim));
  }
  return moved(std::move(map), std::move(dims));
}

DimMap select(const RuleCall& call) {
  DimMap map = whole_map(call);
  const int gone[] = {call.dim("dim", call.rank(0))};
  Dims dims = label_all(map, call, 0, gone);
  dims.erase(dims.begin() + gone[0]);
  return moved(std::move(map), std::move(dims));
}

/// Length of `[start:end:step]` of `size` entries, by the rules of indexing.
std::int64_t slice_length(
    std::int64_t size, std::int64_t start, std::int64_t end, std::int64_t step
) {
  const auto clamp = [size](std::int64_t i) {
    return std::clamp<std::int64_t>(i < 0 ? i + size : i, 0, size);
  };
  start = clamp(start);
  end = std::max(clamp(end), start);
  return (end - start + step - 1) / step;
}

/// A slice that takes all of a cut dimension on every rank leaves it cut.
DimMap sliced(const RuleCall& call, std::int64_t start, std::int64_t end, std::int64_t step) {
  DimMap map = whole_map(call);
  const int dim = call.dim("dim", call.rank(0));
  const std::int64_t size = call.local_shape(0)[at(dim)];
  const bool takes_all =
      start == 0 && step == 1 && (end == size || end >= call.piece_sizes(0, dim).most);
  const int taken[] = {takes_all ? -1 : dim};
  Dims dims = label_all(map, call, 0, taken);
  if (!takes_all) {
    dims[at(dim)].size = slice_length(size, start, end, step);
  }
  return moved(std::move(map), std::move(dims));
}

DimMap slice(const RuleCall& call) {
  return sliced(
      call, call.integer("start", 0), call.integer("end", INT64_MAX), call.integer("step", 1)
  );
}

DimMap narrow(const RuleCall& call) {
  const int dim = call.dim("dim", call.rank(0));
  if (call.operand("start") >= 0) {
    DimMap map = whole_map(call);
    const int taken[] = {dim};
    Dims dims = label_all(map, call, 0, taken);
    dims[at(dim)].size = call.integer("length");
    return moved(std::move(map), std::move(dims));
  }
  std::int64_t start = call.integer("start");
  start += start < 0 ? call.local_shape(0)[at(dim)] : 0;
  return sliced(call, start, start + call.integer("length"), 1);
}

/// Outputs that take `sizes` entries of a dimension each.
DimMap pieces(const RuleCall& call, int dim, const std::vector<std::int64_t>& sizes) {
  DimMap map = whole_map(call);
  const int taken[] = {dim};
  Dims dims = label_all(map, call, 0, taken);
  for (const std::int64_t size : sizes) {
    dims[at(dim)].size = size;
    map.outputs.push_back({dims});
  }
  moves(map, 0);
  return map;
}

std::vector<std::int64_t> equal_pieces(std::int64_t size, std::int64_t each) {
  std::vector<std::int64_t> sizes;
  for (std::int64_t begin = 0; each > 0 && begin < size; begin += each) {
    sizes.push_back(std::min(each, size - begin));
  }
  return sizes.empty() ? std::vector<std::int64_t>{size} : sizes;
}

DimMap split(const RuleCall& call) {
  const int dim = call.dim("dim", call.rank(0));
  const char* name = call.find("split_sizes") != nullptr ? "split_sizes" : "split_size";
  const std::vector<std::int64_t> sizes = call.integers(name);
  const bool is_list = call.find(name)->isList();
  return pieces(call, dim, is_list ? sizes : equal_pieces(call.shape(0)[at(dim)], sizes[0]));
}

DimMap chunk(const RuleCall& call) {
  const int dim = call.dim("dim", call.rank(0));
  const std::int64_t size = call.shape(0)[at(dim)];
  const std::int64_t chunks = call.integer("chunks");
  std::vector<std::int64_t> sizes = equal_pieces(size, (size + chunks - 1) / chunks);
  if (size == 0) {
    sizes.assign(static_cast<std::size_t>(chunks), 0);
  }
  return pieces(call, dim, sizes);
}

DimMap tensor_split(const RuleCall& call) {
  if (call.num_operands() > 1) {
    return refuse("the pieces' sizes depend on values", "split by integers");
  }
  const int dim = call.dim("dim", call.rank(0));
  const std::int64_t size = call.shape(0)[at(dim)];
  std::vector<std::int64_t> sizes;
  if (call.find("sections") != nullptr) {
    const std::int64_t sections = call.integer("sections");
    for (std::int64_t i = 0; i < sections; ++i) {
      sizes.push_back(size / sections + (i < size % sections ? 1 : 0));
    }
  } else {
    std::int64_t begin = 0;
    std::vector<std::int64_t> ends = call.integers("indices");
    ends.push_back(size);
    for (const std::int64_t end : ends) {
      sizes.push_back(slice_length(size, begin, end, 1));
      begin = end;
    }
  }
  return pieces(call, dim, sizes);
}

DimMap unbind(const RuleCall& call) {
  DimMap map = whole_map(call);
  const int gone[] = {call.dim("dim", call.rank(0))};
  Dims dims = label_all(map, call, 0, gone);
  dims.erase(dims.begin() + gone[0]);
  map.outputs.assign(static_cast<std::size_t>(call.shape(0)[at(gone[0])]), {dims});
  moves(map, 0);
  return map;
}

DimMap diagonal(const RuleCall& call) {
  DimMap map = whole_map(call);
  const int gone[] = {call.dim("dim1", call.rank(0)), call.dim("dim2", call.rank(0))};
  Dims dims = label_all(map, call, 0, gone);
  const std::int64_t offset = call.integer("offset");
  const std::int64_t rows = dims[at(gone[0])].size + std::min<std::int64_t>(offset, 0);
  const std::int64_t columns = dims[at(gone[1])].size - std::max<std::int64_t>(offset, 0);
  dims.erase(dims.begin() + std::max(gone[0], gone[1]));
  dims.erase(dims.begin() + std::min(gone[0], gone[1]));
  dims.push_back(Dim::whole(std::max<std::int64_t>(std::min(rows, columns), 0)));
  return moved(std::move(map), std::move(dims));
}

/// Entries move along `argument`'s dimensions and nowhere else.
DimMap along(const RuleCall& call, std::string_view argument) {
  DimMap map = whole_map(call);
  const bool is_none =
      argument == "dims" && call.name() == "aten::flip" && call.integers(argument).empty();
  const std::vector<int> whole = is_none ? std::vector<int>{} : call.dims(argument, call.rank(0));
  Dims dims = label_all(map, call, 0, whole);
  return moved(std::move(map), std::move(dims));
}

DimMap triangle(const RuleCall& call) {
  DimMap map = whole_map(call);
  const int whole[] = {call.rank(0) - 2, call.rank(0) - 1};
  Dims dims = label_all(map, call, 0, whole);
  map.outputs = {{std::move(dims)}};
  linear(map, 0);
  return map;
}

DimMap unfold(const RuleCall& call) {
  DimMap map = whole_map(call);
  const int dim = call.dim("dimension", call.rank(0));
  const int whole[] = {dim};
  Dims dims = label_all(map, call, 0, whole);
  if (!dims.empty()) {
    dims[at(dim)].size = (call.shape(0)[at(dim)] - call.integer("size")) / call.integer("step") + 1;
  }
  dims.push_back(Dim::whole(call.integer("size")));
  return moved(std::move(map), std::move(dims));
}

DimMap no_rule_for_strides(const RuleCall& call) {
  DimMap map = whole_map(call);
  Dims dims;
  for (const std::int64_t size : call.integers("size")) {
    dims.push_back(Dim::whole(size));
  }
  return moved(std::move(map), std::move(dims));
}

}  // namespace

void add_views(internal::RuleRegistry& registry) {
  const auto add = [&](const char* name, OpRule rule) {
    registry.add(std::string("aten::") + name, "views", std::move(rule));
  };
  for (const char* name : {"alias", "clone", "contiguous", "detach", "lift_fresh"}) {
    add(name, same);
  }
  for (const char* name : {"transpose", "swapdims"}) {
    add(name, [](const RuleCall& call) { return swap(call, "dim0", "dim1"); });
  }
  add("swapaxes", [](const RuleCall& call) { return swap(call, "axis0", "axis1"); });
  for (const char* name : {"t", "mT"}) {
    add(name, transpose_last);
  }
  add("numpy_T", reverse_dims);
  add("permute", permute);
  add("movedim", movedim);
  add("moveaxis", movedim);
  add("unsqueeze", unsqueeze);
  add("squeeze", squeeze);
  add("select", select);
  add("slice", slice);
  add("narrow", narrow);
  for (const char* name :
       {"split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"}) {
    add(name, split);
  }
  add("chunk", chunk);
  add("unsafe_chunk", chunk);
  add("tensor_split", tensor_split);
  add("unbind", unbind);
  add("diagonal", diagonal);
  for (const char* name : {"flip", "roll"}) {
    add(name, [](const RuleCall& call) { return along(call, "dims"); });
  }
  add("tril", triangle);
  add("triu", triangle);
  add("unfold", unfold);
  registry.add("aten::as_strided", "views", no_rule_for_strides, false);
}

}  // namespace hypershard::dtensor::rules
