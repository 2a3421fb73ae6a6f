// Operators that autograd calls. All are linear in the gradient that arrives; gradients of what a
// whole batch shares are summed over its cut indices.
#include <algorithm>

#include <ATen/core/ivalue.h>

#include "hypershard/dtensor/rules/dim_building.h"
#include "hypershard/dtensor/rules/families.h"

namespace hypershard::dtensor::rules {
namespace {

DimMap entrywise(const RuleCall& call) {
  DimMap map = whole_map(call);
  std::vector<int> all;
  for (int i = 0; i < call.num_operands(); ++i) {
    // log_sigmoid's buffer is empty on CPU builds without vectors.
    const bool is_buffer = call.operand_name(i) == "buffer";
    all.push_back(is_buffer && call.shape(i) != call.shape(0) ? -1 : i);
  }
  Dims dims = broadcast(map, call, all);
  map.outputs = {{std::move(dims)}};
  linear(map, 0);
  return map;
}

DimMap softmax_backward(const RuleCall& call) {
  DimMap map = whole_map(call);
  const int whole[] = {call.dim("dim", call.rank(0))};
  Dims dims = label_all(map, call, 0, whole);
  for (int dim = 0; dim < call.rank(0); ++dim) {
    if (dim != whole[0]) {
      share_dim(map, 1, dim, dims[at(dim)]);
    }
  }
  map.outputs = {{std::move(dims)}};
  linear(map, 0);
  return map;
}

bool wants(const RuleCall& call, std::size_t output) {
  return call.find("output_mask")->toListRef()[output].toBool();
}

/// Gradients of input, weight and bias; the free dimensions in front are summed over.
DimMap layer_norm_backward(const RuleCall& call) {
  DimMap map = whole_map(call);
  const int input = call.operand("input");
  const auto num_normalised = static_cast<int>(call.integers("normalized_shape").size());
  const int num_free = call.rank(input) - num_normalised;
  Dims dims;
  for (int dim = 0; dim < call.rank(input); ++dim) {
    if (dim >= num_free) {
      dims.push_back(Dim::whole(call.shape(input)[at(dim)]));
      continue;
    }
    dims.push_back(label_dim(map, input, dim, Reduction::kSum));
    share_dim(map, 0, dim, dims.back());
    for (const char* name : {"mean", "rstd"}) {
      share_dim(map, call.operand(name), dim, dims.back());
    }
  }
  const Dims shared(dims.begin() + num_free, dims.end());
  for (std::size_t i = 0; i < 3; ++i) {
    map.outputs.push_back({i == 0 ? dims : shared, wants(call, i), {}});
  }
  linear(map, 0);
  return map;
}

DimMap embedding_backward(const RuleCall& call) {
  DimMap map = whole_map(call);
  const int indices = call.operand("indices");
  for (int dim = 0; dim < call.rank(indices); ++dim) {
    share_dim(map, 0, dim, label_dim(map, indices, dim, Reduction::kSum));
  }
  const Dim column = label_dim(map, 0, call.rank(0) - 1);
  map.outputs = {{{Dim::whole(call.integer("num_weights")), column}}};
  linear(map, 0);
  return map;
}

/// Gradients of input, weight and bias of a convolution without groups.
DimMap convolution_backward(const RuleCall& call) {
  if (call.integer("groups") != 1) {
    return refuse("groups have no rule in backward", "register one");
  }
  DimMap map = whole_map(call);
  const int grad = 0;
  const int input = 1;
  const int weight = 2;
  const bool is_transposed = call.flag("transposed");
  const Dim batch = label_dim(map, grad, 0, Reduction::kSum);
  const Dim out = label_dim(map, grad, 1, Reduction::kSum);
  const Dim in = label_dim(map, input, 1, Reduction::kSum);
  share_dim(map, input, 0, batch);
  share_dim(map, weight, is_transposed ? 1 : 0, out);
  share_dim(map, weight, is_transposed ? 0 : 1, in);
  Dims grad_input = {batch, in};
  Dims grad_weight = is_transposed ? Dims{in, out} : Dims{out, in};
  for (int dim = 2; dim < call.rank(input); ++dim) {
    grad_input.push_back(Dim::whole(call.shape(input)[at(dim)]));
    grad_weight.push_back(Dim::whole(call.shape(weight)[at(dim)]));
  }
  map.outputs = {
      {std::move(grad_input), wants(call, 0), {grad, weight}},
      {std::move(grad_weight), wants(call, 1), {grad, input}},
      {{out}, wants(call, 2), {grad}}
  };
  map.takes_empty = false;
  linear(map, 0);
  return map;
}

/// Gradients of images: shaped like `input_size` or an operand, batch and channels free.
DimMap image_backward(const RuleCall& call, int num_spatial) {
  DimMap map = whole_map(call);
  const int self = call.operand("self");
  const std::vector<std::int64_t> sizes =
      self >= 0 ? call.shape(self) : call.integers("input_size");
  Dims dims;
  for (int dim = 0; dim < call.rank(0); ++dim) {
    if (dim >= call.rank(0) - num_spatial) {
      dims.push_back(Dim::whole(sizes[at(dim)]));
      continue;
    }
    dims.push_back(label_dim(map, 0, dim));
    for (int operand = 1; operand < call.num_operands(); ++operand) {
      share_dim(map, operand, dim, dims.back());
    }
  }
  map.outputs = {{std::move(dims)}};
  map.takes_empty = false;
  linear(map, 0);
  return map;
}

/// Puts a gradient back where a slice or an entry was taken.
DimMap put_back(const RuleCall& call, std::string_view sizes_name, bool is_dropped) {
  DimMap map = whole_map(call);
  const std::vector<std::int64_t> sizes = call.integers(sizes_name);
  const int dim = call.dim("dim", static_cast<int>(sizes.size()));
  Dims dims;
  for (int i = 0; i < static_cast<int>(sizes.size()); ++i) {
    const int from = is_dropped && i > dim ? i - 1 : i;
    dims.push_back(i == dim ? Dim::whole(sizes[at(i)]) : label_dim(map, 0, from));
  }
  for (int operand = 1; operand < call.num_operands(); ++operand) {
    for (int i = 0; i < call.rank(operand); ++i) {
      map.operands[at(operand)].dims[at(i)] = map.operands[0].dims[at(i)];
    }
  }
  map.outputs = {{std::move(dims)}};
  linear(map, 0);
  return map;
}

DimMap glu_backward(const RuleCall& call) {
  DimMap map = whole_map(call);
  const int whole[] = {call.dim("dim", call.rank(0))};
  Dims dims = label_all(map, call, 1, whole);
  for (int dim = 0; dim < call.rank(0); ++dim) {
    if (dim != whole[0]) {
      share_dim(map, 0, dim, dims[at(dim)]);
    }
  }
  map.outputs = {{std::move(dims)}};
  linear(map, 0);
  return map;
}

}  // namespace

void add_backward(internal::RuleRegistry& registry) {
  const auto add = [&](const char* name, OpRule rule) {
    registry.add(std::string("aten::") + name, "backward", std::move(rule));
  };
  for (const char* name :
       {"elu_backward",
        "gelu_backward",
        "hardsigmoid_backward",
        "hardswish_backward",
        "hardtanh_backward",
        "leaky_relu_backward",
        "log_sigmoid_backward",
        "logit_backward",
        "mish_backward",
        "native_dropout_backward",
        "sigmoid_backward",
        "silu_backward",
        "softplus_backward",
        "tanh_backward",
        "threshold_backward"}) {
    add(name, entrywise);
  }
  add("_softmax_backward_data", softmax_backward);
  add("_log_softmax_backward_data", softmax_backward);
  add("native_layer_norm_backward", layer_norm_backward);
  add("embedding_dense_backward", embedding_backward);
  add("convolution_backward", convolution_backward);
  for (const char* name :
       {"avg_pool2d_backward",
        "max_pool2d_with_indices_backward",
        "_adaptive_avg_pool2d_backward",
        "upsample_nearest2d_backward",
        "upsample_bilinear2d_backward"}) {
    add(name, [](const RuleCall& call) { return image_backward(call, 2); });
  }
  add("slice_backward", [](const RuleCall& call) { return put_back(call, "input_sizes", false); });
  add("select_backward", [](const RuleCall& call) { return put_back(call, "input_sizes", true); });
  add("glu_backward", glu_backward);
}

}  // namespace hypershard::dtensor::rules
