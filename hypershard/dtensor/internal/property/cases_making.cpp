// Calls of casts, copies, fills and random operators; those whose probability is 0 or 1 have values
// to compare.
#include "hypershard/dtensor/internal/property/rule_case.h"

namespace hypershard::dtensor::property {
namespace {

std::int64_t type_number(at::ScalarType type) {
  return static_cast<std::int64_t>(type);
}

}  // namespace

void add_making_cases(RuleCases& cases) {
  for (const char* op : {"zeros_like", "ones_like", "zero"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       return Arguments{d.real(d.shape(1))};
                     }});
  }
  for (const char* op : {"full_like", "fill.Scalar"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       return Arguments{d.real(d.shape(1)), 1.5};
                     }});
  }
  cases.push_back({"aten::fill.Tensor", [](Draw& d) {
                     return Arguments{d.real(d.shape(1)), d.real({})};
                   }});
  for (const char* op :
       {"empty_like", "exponential_", "normal_", "rand_like", "randn_like", "random_", "uniform_"
       }) {
    cases.push_back(
        {std::string("aten::") + op,
         [](Draw& d) { return Arguments{d.real(d.shape(1))}; },
         Compare::kShapes}
    );
  }
  cases.push_back(
      {"aten::randint_like",
       [](Draw& d) { return Arguments{d.real(d.shape(1)), 7}; },
       Compare::kShapes}
  );
  cases.push_back({"aten::copy", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     return Arguments{d.real(shape), d.real(d.beside(shape))};
                   }});
  cases.push_back({"aten::to.dtype", [](Draw& d) {
                     const auto type = d.flag() ? at::kDouble : at::kLong;
                     return Arguments{d.real(d.shape(1), -9, 9), type_number(type)};
                   }});
  for (const char* op : {"to.other", "type_as"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       return Arguments{
                           d.real(d.shape(1), -9, 9),
                           d.flag() ? d.real(d.shape(1)) : d.flags(d.shape(1))
                       };
                     }});
  }
  cases.push_back({"aten::_to_copy", [](Draw& d) {
                     return Arguments{
                         d.real(d.shape(1), -9, 9), named("dtype", type_number(at::kDouble))
                     };
                   }});
  cases.push_back({"aten::dropout", [](Draw& d) {
                     const bool is_on = d.flag();
                     return Arguments{d.real(d.shape(1)), is_on ? 0.0 : 0.5, is_on};
                   }});
  cases.push_back({"aten::native_dropout", [](Draw& d) {
                     return Arguments{d.real(d.shape(1)), 0.0, true};
                   }});
  cases.push_back({"aten::bernoulli", [](Draw& d) {
                     return Arguments{at::Tensor(d.whole_numbers(d.shape(1), 2).to(at::kDouble))};
                   }});
  cases.push_back({"aten::bernoulli.p", [](Draw& d) {
                     return Arguments{d.real(d.shape(1)), d.flag() ? 1.0 : 0.0};
                   }});
  cases.push_back(
      {"aten::multinomial",
       [](Draw& d) { return Arguments{d.real({d.even(), 6}, 0.1, 1.0), 2}; },
       Compare::kShapes}
  );
}

}  // namespace hypershard::dtensor::property
