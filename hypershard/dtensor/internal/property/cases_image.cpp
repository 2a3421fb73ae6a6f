// Calls of convolutions, pooling, resampling and padding.
#include "hypershard/dtensor/internal/property/rule_case.h"

namespace hypershard::dtensor::property {
namespace {

Sizes image(Draw& d, std::int64_t channels, int spatial) {
  Sizes shape = {d.size(), channels};
  for (int i = 0; i < spatial; ++i) {
    shape.push_back(5 + d.number(4));
  }
  return shape;
}

Sizes times(std::int64_t value, int count) {
  return Sizes(static_cast<std::size_t>(count), value);
}

Sizes kernel(std::int64_t first, std::int64_t second, int spatial) {
  Sizes shape = {first, second};
  for (int i = 0; i < spatial; ++i) {
    shape.push_back(3);
  }
  return shape;
}

void add_convs(RuleCases& cases) {
  for (int spatial = 1; spatial <= 3; ++spatial) {
    const std::string rank = std::to_string(spatial) + "d";
    for (const bool has_bias : {false, true}) {
      cases.push_back({"aten::conv" + rank, [=](Draw& d) {
                         const std::int64_t in = 1 + d.size();
                         const std::int64_t out = 1 + d.size();
                         return Arguments{
                             d.real(image(d, in, spatial)),
                             d.real(kernel(out, in, spatial)),
                             has_bias ? Argument(d.real({out})) : none(),
                             times(1 + d.number(2), spatial),
                             times(d.number(2), spatial)
                         };
                       }});
      cases
          .push_back({"aten::conv_transpose" + rank + (spatial == 1 ? "" : ".input"), [=](Draw& d) {
                        const std::int64_t in = 1 + d.size();
                        const std::int64_t out = 1 + d.size();
                        return Arguments{
                            d.real(image(d, in, spatial)),
                            d.real(kernel(in, out, spatial)),
                            has_bias ? Argument(d.real({out})) : none(),
                            times(2, spatial),
                            times(1, spatial),
                            times(1, spatial)
                        };
                      }});
    }
  }
  // Depthwise, twice as many outputs: the number of groups is the rank's own number of channels.
  cases.push_back({"aten::conv2d", [](Draw& d) {
                     const std::int64_t channels = d.even();
                     return Arguments{
                         d.real(image(d, channels, 2)),
                         d.real({2 * channels, 1, 3, 3}),
                         d.real({2 * channels}),
                         times(1, 2),
                         times(1, 2),
                         times(1, 2),
                         std::function<c10::IValue(const Tensors&)>([](const Tensors& t) {
                           return c10::IValue(t[0].size(1));
                         })
                     };
                   }});
  cases.push_back({"aten::conv2d.padding", [](Draw& d) {
                     const std::int64_t in = 1 + d.size();
                     const std::int64_t out = 1 + d.size();
                     return Arguments{
                         d.real(image(d, in, 2)),
                         d.real(kernel(out, in, 2)),
                         none(),
                         times(1, 2),
                         d.flag() ? "same" : "valid"
                     };
                   }});
  cases.push_back({"aten::convolution", [](Draw& d) {
                     const std::int64_t in = 1 + d.size();
                     const std::int64_t out = 1 + d.size();
                     const bool is_transposed = d.flag();
                     return Arguments{
                         d.real(image(d, in, 2)),
                         d.real(is_transposed ? kernel(in, out, 2) : kernel(out, in, 2)),
                         none(),
                         times(1, 2),
                         times(1, 2),
                         times(1, 2),
                         is_transposed,
                         times(0, 2),
                         1
                     };
                   }});
  cases.push_back({"aten::_convolution", [](Draw& d) {
                     const std::int64_t in = 1 + d.size();
                     const std::int64_t out = 1 + d.size();
                     return Arguments{
                         d.real(image(d, in, 2)),
                         d.real(kernel(out, in, 2)),
                         none(),
                         times(1, 2),
                         times(1, 2),
                         times(1, 2),
                         false,
                         times(0, 2),
                         1,
                         false,
                         false,
                         false,
                         false
                     };
                   }});
  cases.push_back({"aten::im2col", [](Draw& d) {
                     return Arguments{
                         d.real(image(d, d.even(), 2)),
                         times(2, 2),
                         times(1, 2),
                         times(1, 2),
                         times(2, 2)
                     };
                   }});
}

void add_pools(RuleCases& cases) {
  for (int spatial = 1; spatial <= 3; ++spatial) {
    const std::string rank = std::to_string(spatial) + "d";
    for (const std::string kind : {"avg_pool", "max_pool"}) {
      cases.push_back({"aten::" + kind + rank, [=](Draw& d) {
                         return Arguments{
                             d.real(image(d, 1 + d.size(), spatial)),
                             times(2, spatial),
                             times(1 + d.number(2), spatial),
                             times(1, spatial),
                             named("ceil_mode", d.flag())
                         };
                       }});
    }
    cases.push_back({"aten::max_pool" + rank + "_with_indices", [=](Draw& d) {
                       return Arguments{d.real(image(d, 1 + d.size(), spatial)), times(3, spatial)};
                     }});
    for (const std::string kind : {"adaptive_avg_pool", "adaptive_max_pool"}) {
      cases.push_back({"aten::" + kind + rank, [=](Draw& d) {
                         return Arguments{
                             d.real(image(d, 1 + d.size(), spatial)), times(2, spatial)
                         };
                       }});
    }
    cases.push_back({"aten::upsample_nearest" + rank, [=](Draw& d) {
                       return Arguments{d.real(image(d, 1 + d.size(), spatial)), times(9, spatial)};
                     }});
    cases.push_back({"aten::upsample_nearest" + rank + ".vec", [=](Draw& d) {
                       return Arguments{
                           d.real(image(d, 1 + d.size(), spatial)),
                           none(),
                           c10::IValue(std::vector<double>(static_cast<std::size_t>(spatial), 1.5))
                       };
                     }});
  }
  cases.push_back({"aten::_adaptive_avg_pool2d", [](Draw& d) {
                     return Arguments{d.real(image(d, 1 + d.size(), 2)), times(3, 2)};
                   }});
  cases.push_back({"aten::upsample_linear1d", [](Draw& d) {
                     return Arguments{d.real(image(d, 1 + d.size(), 1)), times(9, 1), d.flag()};
                   }});
  for (const char* op : {"upsample_bilinear2d", "upsample_bicubic2d"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       return Arguments{d.real(image(d, 1 + d.size(), 2)), times(9, 2), d.flag()};
                     }});
  }
  for (const char* op : {"channel_shuffle", "native_channel_shuffle"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       return Arguments{d.real(image(d, d.even(), 2)), 2};
                     }});
  }
}

void add_pads(RuleCases& cases) {
  cases.push_back({"aten::pad", [](Draw& d) {
                     return Arguments{
                         d.real(d.shape(2, 4)),
                         Sizes{1, d.number(2), 0, d.number(2)},
                         "constant",
                         d.flag() ? 0.0 : 1.0
                     };
                   }});
  cases.push_back({"aten::constant_pad_nd", [](Draw& d) {
                     return Arguments{d.real(d.shape(1, 4)), Sizes{1, 2}, d.flag() ? 0.0 : 1.0};
                   }});
  for (const char* op : {"reflection_pad1d", "replication_pad1d"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       return Arguments{d.real(image(d, 1 + d.size(), 1)), Sizes{1, 2}};
                     }});
  }
  for (const char* op : {"reflection_pad2d", "replication_pad2d"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       return Arguments{d.real(image(d, 1 + d.size(), 2)), Sizes{1, 2, 0, 1}};
                     }});
  }
}

}  // namespace

void add_image_cases(RuleCases& cases) {
  add_convs(cases);
  add_pools(cases);
  add_pads(cases);
}

}  // namespace hypershard::dtensor::property
