// Calls of the operators that autograd calls.
#include "hypershard/dtensor/internal/property/rule_case.h"

namespace hypershard::dtensor::property {
namespace {

Argument mask(std::initializer_list<bool> wanted) {
  c10::List<bool> list;
  for (const bool is_wanted : wanted) {
    list.push_back(is_wanted);
  }
  return c10::IValue(list);
}

void add_entrywise(RuleCases& cases) {
  for (const char* op :
       {"gelu_backward",
        "hardsigmoid_backward",
        "hardswish_backward",
        "mish_backward",
        "sigmoid_backward",
        "silu_backward",
        "tanh_backward"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       const Sizes shape = d.shape(1);
                       return Arguments{d.real(shape), d.real(shape)};
                     }});
  }
  cases.push_back({"aten::threshold_backward", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     return Arguments{d.real(shape), d.real(shape), 0.0};
                   }});
  cases.push_back({"aten::logit_backward", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     return Arguments{d.real(shape), d.real(shape, 0.1, 0.9)};
                   }});
  cases.push_back({"aten::log_sigmoid_backward", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     return Arguments{d.real(shape), d.real(shape), d.real(shape, 0.1, 0.9)};
                   }});
  cases.push_back({"aten::native_dropout_backward", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     return Arguments{d.real(shape), d.flags(shape), 2.0};
                   }});
  for (const char* op : {"hardtanh_backward", "softplus_backward"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       const Sizes shape = d.shape(1);
                       return Arguments{d.real(shape), d.real(shape), 1.0, 2.0};
                     }});
  }
  cases.push_back({"aten::leaky_relu_backward", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     return Arguments{d.real(shape), d.real(shape), 0.1, false};
                   }});
  cases.push_back({"aten::elu_backward", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     return Arguments{d.real(shape), 1.0, 1.0, 1.0, false, d.real(shape)};
                   }});
  for (const char* op : {"_softmax_backward_data", "_log_softmax_backward_data"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       const Sizes shape = d.shape(1);
                       return Arguments{
                           d.real(shape),
                           d.real(shape),
                           d.dim(shape),
                           static_cast<std::int64_t>(at::kDouble)
                       };
                     }});
  }
  cases.push_back({"aten::glu_backward", [](Draw& d) {
                     const std::int64_t rows = d.size();
                     return Arguments{d.real({rows, 3}), d.real({rows, 6}), 1};
                   }});
}

void add_layers(RuleCases& cases) {
  cases.push_back({"aten::native_layer_norm_backward", [](Draw& d) {
                     const Sizes shape = {d.size(), d.size(), 4};
                     const Sizes statistics = {shape[0], shape[1], 1};
                     return Arguments{
                         d.real(shape),
                         d.real(shape),
                         Sizes{4},
                         d.real(statistics),
                         d.real(statistics, 0.5, 2.0),
                         d.real({4}),
                         d.real({4}),
                         d.flag() ? mask({true, true, true}) : mask({true, false, false})
                     };
                   }});
  cases.push_back({"aten::embedding_dense_backward", [](Draw& d) {
                     const std::int64_t count = d.size();
                     return Arguments{
                         d.real({count, d.size()}), d.whole_numbers({count}, 5), 5, -1, false
                     };
                   }});
  cases.push_back({"aten::convolution_backward", [](Draw& d) {
                     const std::int64_t batch = d.size();
                     const std::int64_t in = 1 + d.size();
                     const std::int64_t out = 1 + d.size();
                     const Sizes ones = {1, 1};
                     return Arguments{
                         d.real({batch, out, 6, 6}),
                         d.real({batch, in, 6, 6}),
                         d.real({out, in, 3, 3}),
                         sizes([](const Tensors& t) { return Sizes{t[0].size(1)}; }),
                         ones,
                         ones,
                         ones,
                         false,
                         Sizes{0, 0},
                         1,
                         mask({true, true, d.flag()})
                     };
                   }});
}

void add_images(RuleCases& cases) {
  const Sizes two = {2, 2};
  const Sizes none_added = {0, 0};
  const Sizes ones = {1, 1};
  cases.push_back({"aten::avg_pool2d_backward", [=](Draw& d) {
                     const Sizes shape = {d.size(), d.size(), 4, 4};
                     const Sizes pooled = {shape[0], shape[1], 2, 2};
                     return Arguments{
                         d.real(pooled), d.real(shape), two, two, none_added, false, true, none()
                     };
                   }});
  cases.push_back({"aten::max_pool2d_with_indices_backward", [=](Draw& d) {
                     const Sizes shape = {d.size(), d.size(), 4, 4};
                     const Sizes pooled = {shape[0], shape[1], 2, 2};
                     return Arguments{
                         d.real(pooled),
                         d.real(shape),
                         two,
                         two,
                         none_added,
                         ones,
                         false,
                         d.whole_numbers(pooled, 16)
                     };
                   }});
  cases.push_back({"aten::_adaptive_avg_pool2d_backward", [](Draw& d) {
                     const Sizes shape = {d.size(), d.size(), 4, 4};
                     return Arguments{d.real({shape[0], shape[1], 2, 2}), d.real(shape)};
                   }});
  for (const char* op : {"upsample_nearest2d_backward", "upsample_bilinear2d_backward"}) {
    const bool is_linear = std::string(op).find("bilinear") != std::string::npos;
    cases.push_back({std::string("aten::") + op, [is_linear](Draw& d) {
                       Arguments made = {
                           d.real({d.size(), d.size(), 6, 6}),
                           Sizes{6, 6},
                           sizes([](const Tensors& t) {
                             return Sizes{t[0].size(0), t[0].size(1), 3, 3};
                           })
                       };
                       if (is_linear) {
                         made.emplace_back(false);
                       }
                       return made;
                     }});
  }
  cases.push_back({"aten::slice_backward", [](Draw& d) {
                     return Arguments{
                         d.real({d.size(), 3, d.size()}),
                         sizes([](const Tensors& t) { return Sizes{t[0].size(0), 5, t[0].size(2)}; }
                         ),
                         1,
                         1,
                         4,
                         1
                     };
                   }});
  cases.push_back({"aten::select_backward", [](Draw& d) {
                     return Arguments{
                         d.real({d.size(), d.size()}),
                         sizes([](const Tensors& t) { return Sizes{t[0].size(0), 5, t[0].size(1)}; }
                         ),
                         1,
                         2
                     };
                   }});
}

}  // namespace

void add_backward_cases(RuleCases& cases) {
  add_entrywise(cases);
  add_layers(cases);
  add_images(cases);
}

}  // namespace hypershard::dtensor::property
