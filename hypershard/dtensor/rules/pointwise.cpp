// Operators that work entry by entry, with broadcasting: any index may be cut, in all operands
// alike. Where they are linear, or monotone, Partial operands pass.
#include <ATen/core/ivalue.h>

#include "hypershard/dtensor/rules/dim_building.h"
#include "hypershard/dtensor/rules/families.h"

namespace hypershard::dtensor::rules {
namespace {

DimMap pointwise(const RuleCall& call, const Terms& terms, const Passes& passes) {
  DimMap map = whole_map(call);
  std::vector<int> all(at(call.num_operands()));
  for (int i = 0; i < call.num_operands(); ++i) {
    all[at(i)] = i;
  }
  Dims dims = broadcast(map, call, all);
  map.outputs = {{std::move(dims)}};
  terms.apply(map, call);
  map.passes = passes;
  return map;
}

OpRule make(std::string_view terms, Passes passes = {}) {
  return [terms = terms.empty() ? Terms() : Terms(terms), passes](const RuleCall& call) {
    return pointwise(call, terms, passes);
  };
}

constexpr const char* kNonlinear[] = {
    "abs",
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan2",
    "atanh",
    "bitwise_and",
    "bitwise_not",
    "bitwise_or",
    "bitwise_xor",
    "celu",
    "copysign",
    "cos",
    "cosh",
    "digamma",
    "elu",
    "eq",
    "erfc",
    "erfinv",
    "exp2",
    "expm1",
    "floor_divide",
    "fmax",
    "fmin",
    "fmod",
    "frac",
    "ge",
    "gelu",
    "gt",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hypot",
    "isfinite",
    "isinf",
    "isnan",
    "le",
    "leaky_relu",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "log_sigmoid",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "logit",
    "lt",
    "mish",
    "nan_to_num",
    "ne",
    "pow",
    "float_power",
    "reciprocal",
    "remainder",
    "rsqrt",
    "selu",
    "sgn",
    "sign",
    "silu",
    "sin",
    "sinc",
    "sinh",
    "softplus",
    "softshrink",
    "sqrt",
    "square",
    "tan",
    "threshold",
    "xlogy",
    "isclose",
    "not_equal",
    "greater",
    "greater_equal",
    "less",
    "less_equal",
    "signbit",
    "i0",
    "exp",
    "sigmoid",
    "__and__",
    "__or__",
    "__xor__",
    "bitwise_left_shift",
    "bitwise_right_shift",
    "absolute",
    "heaviside",
    "special_expit"
};
// No larger argument gives a smaller result, for every real number: maxima and minima pass.
constexpr const char* kMonotoneNames[] = {
    "relu", "relu6", "hardtanh", "tanh", "atan", "erf", "floor", "ceil", "trunc", "round"
};

DimMap clamp(const RuleCall& call) {
  const bool has_operands = call.num_operands() > 1;  // bounds that are tensors may move with it
  static const Terms kSelf("self");
  return has_operands ? pointwise(call, {}, {}) : pointwise(call, kSelf, kMonotone);
}

DimMap divide(const RuleCall& call) {
  static const Terms kSelf("self");
  return pointwise(call, call.has("rounding_mode") ? Terms() : kSelf, {});
}

DimMap where(const RuleCall& call) {
  if (call.num_operands() == 1 && !call.has("other")) {
    return refuse("the result's size depends on values", "use where with three operands, or topk");
  }
  static const Terms kBoth("self|other");
  return pointwise(call, kBoth, {});
}

DimMap maximum(const RuleCall& call) {
  static const Terms kBoth("self|other");
  return pointwise(call, kBoth, {.sum = false, .max = true, .min = false});
}

DimMap minimum(const RuleCall& call) {
  static const Terms kBoth("self|other");
  return pointwise(call, kBoth, {.sum = false, .max = false, .min = true});
}

DimMap prelu(const RuleCall& call) {
  DimMap map = whole_map(call);
  Dims dims = label_all(map, call, 0);
  const int channel = call.rank(0) > 1 ? 1 : 0;
  if (call.rank(1) == 1 && call.shape(1)[0] != 1 && call.rank(0) > 0) {
    share_dim(map, 1, 0, dims[at(channel)]);
  }
  map.outputs = {{std::move(dims)}};
  return map;
}

DimMap glu(const RuleCall& call) {
  DimMap map = whole_map(call);
  const int halved[] = {call.dim("dim", call.rank(0))};
  Dims dims = label_all(map, call, 0, halved);
  dims[at(halved[0])].size /= 2;
  map.outputs = {{std::move(dims)}};
  return map;
}

DimMap bucketize(const RuleCall& call) {
  DimMap map = whole_map(call);
  const int self = call.operand("self");
  if (self < 0) {
    map.outputs = {{{}}};
    return map;
  }
  map.outputs = {{label_all(map, call, self)}};
  return map;
}

}  // namespace

void add_pointwise(internal::RuleRegistry& registry) {
  const auto add = [&](const char* name, OpRule rule) {
    registry.add(std::string("aten::") + name, "pointwise", std::move(rule));
  };
  for (const char* name : kNonlinear) {
    add(name, make(""));
  }
  for (const char* name : kMonotoneNames) {
    add(name, make("self", kMonotone));
  }
  for (const char* name : {"neg", "negative", "positive", "deg2rad", "rad2deg"}) {
    add(name, make("self"));
  }
  for (const char* name : {"add", "sub", "subtract", "rsub"}) {
    add(name, make("self|other"));
  }
  for (const char* name : {"mul", "multiply"}) {
    add(name, make("self*other"));
  }
  for (const char* name : {"div", "divide", "true_divide"}) {
    add(name, divide);
  }
  for (const char* name : {"clamp", "clamp_min", "clamp_max", "clip"}) {
    add(name, clamp);
  }
  add("where", where);
  add("masked_fill", make("self|value"));
  add("lerp", make("self|end"));
  add("addcmul", make("self|tensor1*tensor2"));
  add("addcdiv", make("self|tensor1"));
  add("maximum", maximum);
  add("minimum", minimum);
  add("prelu", prelu);
  add("glu", glu);
  add("bucketize", bucketize);
}

}  // namespace hypershard::dtensor::rules
