// Calls of operators that move, split, merge and repeat dimensions. Sizes in calls are computed
// from the rank's own tensors, as model code does.
#include <algorithm>

#include "hypershard/dtensor/internal/property/rule_case.h"

namespace hypershard::dtensor::property {
namespace {

void add_moves(RuleCases& cases) {
  for (const char* op : {"alias", "clone", "contiguous", "detach", "lift_fresh"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       return Arguments{d.real(d.shape(1))};
                     }});
  }
  for (const char* op : {"transpose.int", "swapaxes", "swapdims", "movedim.int", "moveaxis.int"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       const Sizes shape = d.shape(1, 4);
                       return Arguments{d.real(shape), d.dim(shape), d.dim(shape)};
                     }});
  }
  cases.push_back({"aten::movedim.intlist", [](Draw& d) {
                     const Sizes shape = d.shape(3, 4);
                     return Arguments{d.real(shape), Sizes{0, 2}, Sizes{-1, 0}};
                   }});
  cases.push_back({"aten::t", [](Draw& d) { return Arguments{d.real(d.shape(1, 2))}; }});
  cases.push_back({"aten::mT", [](Draw& d) { return Arguments{d.real(d.shape(2, 4))}; }});
  cases.push_back({"aten::numpy_T", [](Draw& d) { return Arguments{d.real(d.shape(2, 2))}; }});
  cases.push_back({"aten::permute", [](Draw& d) {
                     const Sizes shape = d.shape(1, 4);
                     Sizes order;
                     for (std::size_t i = 0; i < shape.size(); ++i) {
                       order.push_back(static_cast<std::int64_t>(i));
                     }
                     std::shuffle(order.begin(), order.end(), d.random);
                     return Arguments{d.real(shape), order};
                   }});
  cases.push_back({"aten::unsqueeze", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     return Arguments{d.real(shape), d.dim(shape) - d.number(2)};
                   }});
  cases.push_back({"aten::squeeze.dim", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     return Arguments{d.real(shape), d.dim(shape)};
                   }});
  cases.push_back({"aten::squeeze.dims", [](Draw& d) {
                     return Arguments{d.real({1, d.size(), d.size()}), Sizes{0, 1}};
                   }});
  cases.push_back({"aten::squeeze", [](Draw& d) { return Arguments{d.real(d.shape(1))}; }});
  for (const char* op : {"flip", "tril", "triu"}) {
    const bool is_flip = op[0] == 'f';
    cases.push_back({std::string("aten::") + op, [is_flip](Draw& d) {
                       const Sizes shape = d.shape(2, 4);
                       return Arguments{
                           d.real(shape),
                           is_flip ? Argument(Sizes{d.dim(shape)}) : Argument(d.number(3) - 1)
                       };
                     }});
  }
  cases.push_back({"aten::roll", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     return Arguments{d.real(shape), Sizes{1}, Sizes{d.dim(shape)}};
                   }});
}

void add_parts(RuleCases& cases) {
  cases.push_back({"aten::select.int", [](Draw& d) {
                     const Sizes shape = d.shape(1, 4);
                     return Arguments{d.real(shape), d.dim(shape), 0};
                   }});
  cases.push_back({"aten::slice.Tensor", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     const bool takes_all = d.flag();
                     return Arguments{
                         d.real(shape),
                         d.dim(shape),
                         takes_all  ? 0
                         : d.flag() ? 1
                                    : -2,
                         takes_all ? INT64_MAX : d.number(9) - 2,
                         takes_all ? 1 : 1 + d.number(2)
                     };
                   }});
  cases.push_back({"aten::narrow", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     const auto dim = d.dim(shape);
                     const bool takes_all = d.flag();
                     return Arguments{
                         d.real(shape),
                         dim,
                         takes_all ? 0 : 1,
                         std::function<c10::IValue(const Tensors&)>([=](const Tensors& t) {
                           return c10::IValue(
                               std::max<std::int64_t>(t[0].size(dim) - (takes_all ? 0 : 1), 0)
                           );
                         })
                     };
                   }});
  for (const char* op :
       {"split.Tensor", "unsafe_split.Tensor", "chunk", "unsafe_chunk", "tensor_split.sections"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       const Sizes shape = d.shape(2);
                       return Arguments{d.real(shape), 1 + d.number(4), d.dim(shape)};
                     }});
  }
  for (const char* op : {"split_with_sizes", "unsafe_split_with_sizes", "split.sizes"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       return Arguments{d.real({d.size(), 6, d.size()}), Sizes{1, 3, 2}, 1};
                     }});
  }
  cases.push_back({"aten::tensor_split.indices", [](Draw& d) {
                     return Arguments{d.real({d.size(), 6}), Sizes{1, 4}, 1};
                   }});
  cases.push_back({"aten::unbind.int", [](Draw& d) {
                     const Sizes shape = d.shape(2);
                     return Arguments{d.real(shape), d.dim(shape)};
                   }});
  cases.push_back({"aten::diagonal", [](Draw& d) {
                     const Sizes shape = d.shape(2, 4);
                     return Arguments{d.real(shape), d.number(3) - 1, 0, 1};
                   }});
  cases.push_back({"aten::unfold", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     return Arguments{
                         d.real(shape), d.dim(shape), 1 + d.number(3), 1 + d.number(2)
                     };
                   }});
}

Sizes head_split(const Tensors& t, std::int64_t inner) {
  const bool can_tell = t[0].numel() > 0;  // of nothing, torch cannot either
  return {t[0].size(0), t[0].size(1), can_tell ? -1 : t[0].size(2) / inner, inner};
}

void add_shapes(RuleCases& cases) {
  for (const char* op : {"view", "reshape", "_unsafe_view"}) {
    const std::string name = std::string("aten::") + op;
    cases.push_back({name, [](Draw& d) {  // merge the first two
                       return Arguments{
                           d.real({d.long_size(), d.long_size(), d.long_size()}),
                           sizes([](const Tensors& t) {
                             return Sizes{t[0].size(0) * t[0].size(1), t[0].size(2)};
                           })
                       };
                     }});
    cases.push_back({name, [](Draw& d) {  // merge the last two
                       return Arguments{
                           d.real({d.long_size(), d.long_size(), d.long_size()}),
                           sizes([](const Tensors& t) {
                             return Sizes{t[0].size(0), t[0].size(1) * t[0].size(2)};
                           })
                       };
                     }});
    cases.push_back({name, [](Draw& d) {  // split into heads
                       const std::int64_t inner = 1 + d.number(4);
                       return Arguments{
                           d.real({d.long_size(), d.long_size(), d.even() * inner}),
                           sizes([inner](const Tensors& t) { return head_split(t, inner); })
                       };
                     }});
    cases.push_back({name, [](Draw& d) {  // keep all
                       return Arguments{d.real(d.shape(1)), sizes([](const Tensors& t) {
                                          return t[0].sizes().vec();
                                        })};
                     }});
    cases.push_back({name, [](Draw& d) {  // a new dimension of 1 at the end
                       return Arguments{
                           d.real({d.long_size(), d.long_size()}), sizes([](const Tensors& t) {
                             return Sizes{t[0].size(0), 1, t[0].size(1), 1};
                           })
                       };
                     }});
  }
}

void add_stretches(RuleCases& cases) {
  for (const char* op : {"view_as", "reshape_as"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       const std::int64_t rows = d.even();
                       return Arguments{d.real({2 * rows, 6}), d.real({2 * rows, 2, 3})};
                     }});
  }
  cases.push_back({"aten::flatten.using_ints", [](Draw& d) {
                     const Sizes shape = d.shape(2, 4);
                     const std::int64_t start = d.dim(shape);
                     const auto last = static_cast<std::int64_t>(shape.size()) - 1;
                     return Arguments{d.real(shape), start, start + d.number(last - start + 1)};
                   }});
  cases.push_back({"aten::ravel", [](Draw& d) { return Arguments{d.real(d.shape(1))}; }});
  cases.push_back({"aten::unflatten.int", [](Draw& d) {
                     const std::int64_t inner = 1 + d.number(4);
                     return Arguments{d.real({d.even(), d.even() * inner}), 1, Sizes{-1, inner}};
                   }});
  for (const char* op : {"expand", "broadcast_to"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       const Sizes shape = {d.size(), 1, d.size()};
                       const std::int64_t many = 1 + d.number(4);
                       return Arguments{d.real(shape), sizes([many](const Tensors& t) {
                                          return Sizes{many, t[0].size(0), many, -1};
                                        })};
                     }});
  }
  cases.push_back({"aten::expand_as", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     return Arguments{d.real(d.beside(shape)), d.real(shape)};
                   }});
  for (const char* op : {"repeat", "tile"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       return Arguments{
                           d.real({d.size(), d.size()}),
                           Sizes{1 + d.number(2), 1 + d.number(2), 1 + d.number(2)}
                       };
                     }});
  }
  cases.push_back({"aten::repeat_interleave.self_int", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     return Arguments{d.real(shape), 1 + d.number(3), d.dim(shape)};
                   }});
  cases.push_back({"aten::pixel_shuffle", [](Draw& d) {
                     return Arguments{d.real({d.size(), d.even() * 4, d.size(), d.size()}), 2};
                   }});
  cases.push_back({"aten::pixel_unshuffle", [](Draw& d) {
                     return Arguments{
                         d.real({1 + d.size(), d.even(), d.size() * 2, d.even() * 2}), 2
                     };
                   }});
}

}  // namespace

void add_view_cases(RuleCases& cases) {
  add_moves(cases);
  add_parts(cases);
  add_shapes(cases);
  add_stretches(cases);
}

}  // namespace hypershard::dtensor::property
