// Calls of reductions, sorts and scans.
#include "hypershard/dtensor/internal/property/rule_case.h"

namespace hypershard::dtensor::property {
namespace {

/// Some dimensions, some counted from the back.
Sizes some_dims(Draw& d, const Sizes& shape) {
  Sizes dims;
  const auto rank = static_cast<std::int64_t>(shape.size());
  for (std::int64_t dim = 0; dim < rank; ++dim) {
    if (d.flag()) {
      dims.push_back(d.flag() ? dim : dim - rank);
    }
  }
  return dims.empty() ? Sizes{rank - 1} : dims;
}

void add_sums(RuleCases& cases) {
  for (const char* op :
       {"sum",
        "mean",
        "prod",
        "max",
        "min",
        "any",
        "all",
        "nansum",
        "count_nonzero",
        "norm.Scalar",
        "std",
        "var",
        "argmax",
        "argmin",
        "median",
        "linalg_vector_norm"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       return Arguments{d.real(d.shape(1))};
                     }});
  }
  for (const char* op :
       {"sum.dim_IntList", "mean.dim", "amax", "amin", "nansum", "any.dims", "all.dims", "logsumexp"
       }) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       const Sizes shape = d.shape(1, 4);
                       return Arguments{d.real(shape), some_dims(d, shape), d.flag()};
                     }});
  }
  for (const char* op :
       {"std.correction",
        "var.correction",
        "var_mean.correction",
        "std_mean.correction",
        "linalg_vector_norm"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       const Sizes shape = d.shape(1, 4);
                       return Arguments{
                           d.real(shape),
                           named("dim", some_dims(d, shape)),
                           named("keepdim", d.flag())
                       };
                     }});
  }
  cases.push_back({"aten::norm.ScalarOpt_dim", [](Draw& d) {
                     const Sizes shape = d.shape(1, 4);
                     return Arguments{
                         d.real(shape), c10::IValue(2.0), some_dims(d, shape), d.flag()
                     };
                   }});
  cases.push_back({"aten::count_nonzero.dim_IntList", [](Draw& d) {
                     const Sizes shape = d.shape(1, 4);
                     return Arguments{d.whole_numbers(shape, 2), some_dims(d, shape)};
                   }});
}

void add_one_dim(RuleCases& cases) {
  for (const char* op :
       {"max.dim",
        "min.dim",
        "prod.dim_int",
        "any.dim",
        "all.dim",
        "argmax",
        "argmin",
        "median.dim",
        "mode"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       const Sizes shape = d.shape(1, 4);
                       return Arguments{d.real(shape), d.dim(shape), d.flag()};
                     }});
  }
  cases.push_back({"aten::aminmax", [](Draw& d) {
                     const Sizes shape = d.shape(1, 4);
                     return Arguments{d.real(shape), named("dim", d.dim(shape))};
                   }});
  for (const char* op : {"max.other", "min.other"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       const Sizes shape = d.shape(1);
                       return Arguments{d.real(shape), d.real(d.beside(shape))};
                     }});
  }
  for (const char* op :
       {"sort", "argsort", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       const Sizes shape = d.shape(1);
                       return Arguments{d.real(shape), d.dim(shape)};
                     }});
  }
  cases.push_back({"aten::msort", [](Draw& d) { return Arguments{d.real(d.shape(1))}; }});
  for (const char* op : {"topk", "kthvalue"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       const Sizes shape = d.shape(1);
                       return Arguments{d.real(shape), 1, d.dim(shape)};
                     }});
  }
  cases.push_back({"aten::diff", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     return Arguments{d.real(shape), 1, d.dim(shape)};
                   }});
  cases.push_back({"aten::cosine_similarity", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     return Arguments{d.real(shape), d.real(shape), d.dim(shape)};
                   }});
}

}  // namespace

void add_reduction_cases(RuleCases& cases) {
  add_sums(cases);
  add_one_dim(cases);
}

}  // namespace hypershard::dtensor::property
