// Calls of softmax, norms and attention.
#include "hypershard/dtensor/internal/property/rule_case.h"

namespace hypershard::dtensor::property {
namespace {

void add_softmaxes(RuleCases& cases) {
  for (const char* op : {"softmax.int", "log_softmax.int"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       const Sizes shape = d.shape(1);
                       return Arguments{d.real(shape), d.dim(shape)};
                     }});
  }
  for (const char* op : {"_softmax", "_log_softmax"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       const Sizes shape = d.shape(1);
                       return Arguments{d.real(shape), d.dim(shape), false};
                     }});
  }
}

Sizes last(const Sizes& shape, bool two) {
  return Sizes(shape.end() - (two && shape.size() > 1 ? 2 : 1), shape.end());
}

void add_norms(RuleCases& cases) {
  for (const char* op : {"layer_norm", "native_layer_norm"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       const Sizes shape = d.shape(2, 4);
                       const Sizes normal = last(shape, d.flag());
                       return Arguments{
                           d.real(shape), normal, d.real(normal), d.real(normal), 1e-5
                       };
                     }});
  }
  for (const char* op : {"rms_norm", "_fused_rms_norm"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       const Sizes shape = d.shape(2, 4);
                       const Sizes normal = last(shape, d.flag());
                       return Arguments{d.real(shape), normal, d.real(normal), 1e-5};
                     }});
  }
  cases.push_back({"aten::group_norm", [](Draw& d) {
                     const std::int64_t block = 1 + d.number(2);
                     const std::int64_t channels = d.even() * block;
                     return Arguments{
                         d.real({d.size(), channels, d.size(), 3}),
                         std::function<c10::IValue(const Tensors&)>([block](const Tensors& t) {
                           return c10::IValue(t[0].size(1) / block);
                         }),
                         d.real({channels}),
                         d.real({channels})
                     };
                   }});
  cases.push_back({"aten::native_group_norm", [](Draw& d) {
                     const std::int64_t channels = d.even();
                     const auto size = [](std::int64_t dim, std::int64_t divide) {
                       return std::function<c10::IValue(const Tensors&)>([=](const Tensors& t) {
                         return c10::IValue(t[0].size(dim) / divide);
                       });
                     };
                     return Arguments{
                         d.real({d.size(), channels, 5}),
                         d.real({channels}),
                         d.real({channels}),
                         size(0, 1),
                         size(1, 1),
                         5,
                         size(1, 1),
                         1e-5
                     };
                   }});
  for (const char* op : {"batch_norm", "native_batch_norm"}) {
    const bool is_native = op[0] == 'n';
    cases.push_back({std::string("aten::") + op, [is_native](Draw& d) {
                       const Sizes shape = {d.size() + 1, d.size(), d.size(), 3};
                       const Sizes channels = {shape[1]};
                       Arguments made = {
                           d.real(shape),
                           d.real(channels),
                           d.real(channels),
                           d.real(channels),
                           d.real(channels, 0.5, 2.0),
                           d.flag(),
                           0.1,
                           1e-5
                       };
                       if (!is_native) {
                         made.emplace_back(false);
                       }
                       return made;
                     }});
  }
  cases.push_back({"aten::instance_norm", [](Draw& d) {
                     const Sizes shape = {d.size(), d.size(), 4, 3};
                     const Sizes channels = {shape[1]};
                     return Arguments{
                         d.real(shape),
                         d.real(channels),
                         d.real(channels),
                         none(),
                         none(),
                         true,
                         0.1,
                         1e-5,
                         false
                     };
                   }});
}

/// Argument number `flag` says whether heads of queries share heads of keys and values.
Arguments attention(Draw& d, bool shares_heads, bool has_mask, bool is_causal) {
  const std::int64_t batch = d.size();
  const std::int64_t heads = shares_heads ? d.even() : d.size();
  const std::int64_t queries = d.size();
  const std::int64_t keys = is_causal ? queries : d.size();
  const std::int64_t width = 4;
  Arguments made = {
      d.real({batch, shares_heads ? 2 * heads : heads, queries, width}),
      d.real({batch, heads, keys, width}),
      d.real({batch, heads, keys, d.size()}),
      has_mask ? Argument(d.real(d.flag() ? Sizes{queries, keys} : Sizes{batch, 1, queries, keys}))
               : none(),
      0.0,
      is_causal
  };
  if (shares_heads) {
    made.push_back(named("enable_gqa", true));
  }
  return made;
}

void add_attentions(RuleCases& cases) {
  const char* op = "aten::scaled_dot_product_attention";
  cases.push_back({op, [](Draw& d) { return attention(d, false, false, false); }});
  cases.push_back({op, [](Draw& d) { return attention(d, false, true, false); }});
  cases.push_back({op, [](Draw& d) { return attention(d, false, false, true); }});
  cases.push_back({op, [](Draw& d) { return attention(d, true, false, true); }});
  cases.push_back({"aten::_scaled_dot_product_attention_math", [](Draw& d) {
                     return attention(d, false, true, false);
                   }});
  cases.push_back({"aten::_scaled_dot_product_flash_attention_for_cpu", [](Draw& d) {
                     const Sizes shape = {1 + d.number(4), d.even(), 1 + d.number(6), 4};
                     return Arguments{d.real(shape), d.real(shape), d.real(shape), 0.0, d.flag()};
                   }});
}

}  // namespace

void add_network_cases(RuleCases& cases) {
  add_softmaxes(cases);
  add_norms(cases);
  add_attentions(cases);
}

}  // namespace hypershard::dtensor::property
