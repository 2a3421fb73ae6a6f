// Calls of operators that work entry by entry.
#include "hypershard/dtensor/internal/property/rule_case.h"

namespace hypershard::dtensor::property {
namespace {

void add_unary(RuleCases& cases) {
  // Where every real number has a result; the others are drawn from (0, 1), NaN agrees with NaN.
  for (const char* op :
       {"abs",         "absolute", "acosh",      "asinh", "atan",     "ceil",       "celu",
        "cos",         "cosh",     "deg2rad",    "elu",   "erf",      "erfc",       "exp",
        "exp2",        "expm1",    "floor",      "frac",  "gelu",     "hardshrink", "hardsigmoid",
        "hardswish",   "hardtanh", "isfinite",   "isinf", "isnan",    "leaky_relu", "log_sigmoid",
        "logical_not", "mish",     "nan_to_num", "neg",   "negative", "positive",   "rad2deg",
        "reciprocal",  "relu",     "relu6",      "round", "selu",     "sgn",        "sigmoid",
        "sign",        "signbit",  "silu",       "sin",   "sinc",     "sinh",       "softplus",
        "softshrink",  "square",   "tan",        "tanh",  "trunc",    "i0"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       return Arguments{d.real(d.shape())};
                     }});
  }
  for (const char* op :
       {"acos",
        "asin",
        "atanh",
        "digamma",
        "erfinv",
        "lgamma",
        "log",
        "log10",
        "log1p",
        "log2",
        "logit",
        "rsqrt",
        "special_expit",
        "sqrt"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       return Arguments{d.real(d.shape(), 0.05, 0.95)};
                     }});
  }
  cases.push_back({"aten::bitwise_not", [](Draw& d) {
                     return Arguments{d.whole_numbers(d.shape(), 9)};
                   }});
  for (const char* op : {"clamp_min", "clamp_max"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       return Arguments{d.real(d.shape()), 0.25};
                     }});
  }
  for (const char* op : {"clamp", "clip"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       return Arguments{d.real(d.shape()), -0.5, 0.75};
                     }});
  }
  cases.push_back({"aten::clamp.Tensor", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     return Arguments{
                         d.real(shape),
                         d.real(d.beside(shape), -1, 0),
                         d.real(d.beside(shape), 0, 1)
                     };
                   }});
  cases.push_back({"aten::threshold", [](Draw& d) {
                     return Arguments{d.real(d.shape()), 0.1, -3.0};
                   }});
  cases.push_back({"aten::glu", [](Draw& d) {
                     Sizes shape = d.shape(1);
                     const std::int64_t dim = d.dim(shape);
                     shape[static_cast<std::size_t>(dim)] *= 2;
                     return Arguments{d.real(shape), dim};
                   }});
}

void add_binary(RuleCases& cases) {
  for (const char* op :
       {"add.Tensor",
        "atan2",
        "copysign.Tensor",
        "div.Tensor",
        "divide.Tensor",
        "eq.Tensor",
        "fmax",
        "fmin",
        "fmod.Tensor",
        "floor_divide",
        "ge.Tensor",
        "greater.Tensor",
        "greater_equal.Tensor",
        "gt.Tensor",
        "heaviside",
        "hypot",
        "isclose",
        "le.Tensor",
        "less.Tensor",
        "less_equal.Tensor",
        "logaddexp",
        "logical_and",
        "logical_or",
        "logical_xor",
        "lt.Tensor",
        "maximum",
        "minimum",
        "mul.Tensor",
        "multiply.Tensor",
        "ne.Tensor",
        "not_equal.Tensor",
        "remainder.Tensor",
        "rsub.Tensor",
        "sub.Tensor",
        "subtract.Tensor",
        "true_divide.Tensor",
        "xlogy.Tensor"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       const Sizes shape = d.shape(1);
                       return Arguments{d.real(d.beside(shape)), d.real(shape, 0.5, 2.0)};
                     }});
  }
  for (const char* op : {"pow.Tensor_Tensor", "float_power.Tensor_Tensor"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       const Sizes shape = d.shape(1);
                       return Arguments{d.real(shape, 0.5, 2.0), d.real(d.beside(shape))};
                     }});
  }
  for (const char* op :
       {"add.Scalar",
        "div.Scalar",
        "eq.Scalar",
        "fmod.Scalar",
        "ge.Scalar",
        "gt.Scalar",
        "le.Scalar",
        "lt.Scalar",
        "mul.Scalar",
        "ne.Scalar",
        "pow.Tensor_Scalar",
        "rsub.Scalar",
        "sub.Scalar"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       return Arguments{d.real(d.shape()), 2.0};
                     }});
  }
  cases.push_back({"aten::div.Tensor_mode", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     return Arguments{
                         d.real(shape), d.real(shape, 0.5, 2.0), named("rounding_mode", "floor")
                     };
                   }});
  for (const char* op :
       {"__and__.Tensor",
        "__or__.Tensor",
        "__xor__.Tensor",
        "bitwise_and.Tensor",
        "bitwise_left_shift.Tensor",
        "bitwise_or.Tensor",
        "bitwise_right_shift.Tensor",
        "bitwise_xor.Tensor"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       const Sizes shape = d.shape(1);
                       return Arguments{
                           d.whole_numbers(shape, 9), d.whole_numbers(d.beside(shape), 5)
                       };
                     }});
  }
}

void add_ternary(RuleCases& cases) {
  cases.push_back({"aten::where.self", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     return Arguments{
                         d.flags(d.beside(shape)), d.real(shape), d.real(d.beside(shape))
                     };
                   }});
  cases.push_back({"aten::where.ScalarOther", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     return Arguments{d.flags(shape), d.real(shape), d.flag() ? 0.0 : 1.5};
                   }});
  cases.push_back({"aten::masked_fill.Scalar", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     return Arguments{
                         d.real(shape), d.flags(d.beside(shape)), d.flag() ? 0.0 : -9.0
                     };
                   }});
  cases.push_back({"aten::masked_fill.Tensor", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     return Arguments{d.real(shape), d.flags(d.beside(shape)), d.real({})};
                   }});
  cases.push_back({"aten::lerp.Scalar", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     return Arguments{d.real(shape), d.real(d.beside(shape)), 0.3};
                   }});
  cases.push_back({"aten::lerp.Tensor", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     return Arguments{d.real(shape), d.real(d.beside(shape)), d.real(shape)};
                   }});
  for (const char* op : {"addcmul", "addcdiv"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       const Sizes shape = d.shape(1);
                       return Arguments{
                           d.real(shape),
                           d.real(d.beside(shape)),
                           d.real(d.beside(shape), 0.5, 2.0),
                           named("value", 0.5)
                       };
                     }});
  }
  cases.push_back({"aten::prelu", [](Draw& d) {
                     const Sizes shape = d.shape(2, 4);
                     return Arguments{d.real(shape), d.real({d.flag() ? shape[1] : 1})};
                   }});
  cases.push_back({"aten::bucketize.Tensor", [](Draw& d) {
                     return Arguments{d.real(d.shape()), at::Tensor(d.real({4}).cumsum(0))};
                   }});
}

}  // namespace

void add_pointwise_cases(RuleCases& cases) {
  add_unary(cases);
  add_binary(cases);
  add_ternary(cases);
}

}  // namespace hypershard::dtensor::property
