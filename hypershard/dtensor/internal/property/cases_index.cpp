// Calls of operators that pick and place by number, and that join tensors.
#include <algorithm>

#include "hypershard/dtensor/internal/property/rule_case.h"

namespace hypershard::dtensor::property {
namespace {

std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

void add_picks(RuleCases& cases) {
  cases.push_back({"aten::embedding", [](Draw& d) {
                     const std::int64_t words = 1 + d.number(7);
                     return Arguments{
                         d.real({words, d.size()}), d.whole_numbers(d.shape(1), words)
                     };
                   }});
  cases.push_back({"aten::index_select", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     const std::int64_t dim = d.dim(shape);
                     return Arguments{
                         d.real(shape), dim, d.whole_numbers({d.size()}, shape[at(dim)])
                     };
                   }});
  for (const char* op : {"gather", "take_along_dim"}) {
    const bool is_gather = op[0] == 'g';
    cases.push_back({std::string("aten::") + op, [is_gather](Draw& d) {
                       const Sizes shape = d.shape(1);
                       const std::int64_t dim = d.dim(shape);
                       Sizes picked = shape;
                       picked[at(dim)] = d.size();
                       const at::Tensor index = d.whole_numbers(picked, shape[at(dim)]);
                       return is_gather ? Arguments{d.real(shape), dim, index}
                                        : Arguments{d.real(shape), index, dim};
                     }});
  }
  cases.push_back({"aten::gather", [](Draw& d) {  // fewer numbers than entries
                     const Sizes shape = {4, d.even()};
                     return Arguments{d.real(shape), 1, d.whole_numbers({3, d.size()}, shape[1])};
                   }});
  for (const char* op : {"index.Tensor", "_unsafe_index.Tensor"}) {
    const std::string name = std::string("aten::") + op;
    cases.push_back({name, [](Draw& d) {
                       const Sizes shape = {4, d.size(), d.size()};
                       return Arguments{d.real(shape), Tensors{d.whole_numbers(d.shape(1, 2), 4)}};
                     }});
    cases.push_back({name, [](Draw& d) {  // side by side, after a free dimension
                       const Sizes shape = {d.size(), 4, 3};
                       const Sizes picked = d.shape(1, 2);
                       return Arguments{
                           d.real(shape),
                           Tensors{
                               at::Tensor(), d.whole_numbers(picked, 4), d.whole_numbers(picked, 3)
                           }
                       };
                     }});
    cases.push_back({name, [](Draw& d) {  // apart: picked dimensions come first
                       const Sizes shape = {4, d.size(), 3};
                       const Sizes picked = d.shape(1, 2);
                       return Arguments{
                           d.real(shape),
                           Tensors{
                               d.whole_numbers(picked, 4), at::Tensor(), d.whole_numbers(picked, 3)
                           }
                       };
                     }});
  }
  cases.push_back({"aten::one_hot", [](Draw& d) {
                     return Arguments{d.whole_numbers(d.shape(1), 5), 5};
                   }});
}

void add_placements(RuleCases& cases) {
  for (const char* op : {"scatter.src", "scatter_add"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       const Sizes shape = d.shape(2);
                       const std::int64_t dim = d.dim(shape);
                       Sizes placed = shape;
                       placed[at(dim)] = std::min<std::int64_t>(1, shape[at(dim)]);
                       return Arguments{
                           d.real(shape),
                           dim,
                           d.whole_numbers(placed, shape[at(dim)]),
                           d.real(placed)
                       };
                     }});
  }
  cases.push_back({"aten::scatter.value", [](Draw& d) {
                     const Sizes shape = d.shape(2);
                     const std::int64_t dim = d.dim(shape);
                     return Arguments{
                         d.real(shape),
                         dim,
                         d.whole_numbers(shape, shape[at(dim)]),
                         d.flag() ? 0.0 : 2.0
                     };
                   }});
  for (const char* op : {"index_add", "index_copy"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       const Sizes shape = d.shape(2);
                       const std::int64_t dim = d.dim(shape);
                       Sizes placed = shape;
                       placed[at(dim)] = std::min<std::int64_t>(1, shape[at(dim)]);
                       return Arguments{
                           d.real(shape),
                           dim,
                           d.whole_numbers({placed[at(dim)]}, shape[at(dim)]),
                           d.real(placed)
                       };
                     }});
  }
  cases.push_back({"aten::index_fill.int_Scalar", [](Draw& d) {
                     const Sizes shape = d.shape(2);
                     const std::int64_t dim = d.dim(shape);
                     return Arguments{
                         d.real(shape),
                         dim,
                         d.whole_numbers({2}, shape[at(dim)]),
                         d.flag() ? 0.0 : 2.0
                     };
                   }});
  cases.push_back({"aten::index_put", [](Draw& d) {
                     const Sizes shape = {4, d.size(), d.size()};
                     const std::int64_t count = 1 + d.number(5);
                     return Arguments{
                         d.real(shape),
                         Tensors{d.whole_numbers({count}, 4)},
                         d.real({count, shape[1], shape[2]}),
                         true
                     };
                   }});
  cases.push_back({"aten::index_put", [](Draw& d) {
                     const Sizes shape = {d.size(), 4, d.size()};
                     return Arguments{
                         d.real(shape),
                         Tensors{at::Tensor(), d.whole_numbers({3}, 4)},
                         d.real({shape[0], 3, shape[2]}),
                         true
                     };
                   }});
}

void add_joins(RuleCases& cases) {
  for (const char* op : {"cat", "concat", "concatenate"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       Sizes shape = d.shape(1);
                       const std::int64_t dim = d.dim(shape);
                       Tensors tensors;
                       for (int i = 0; i < 3; ++i) {
                         shape[at(dim)] = d.size();
                         tensors.push_back(d.real(shape));
                       }
                       return Arguments{tensors, dim};
                     }});
  }
  cases.push_back({"aten::stack", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     return Arguments{Tensors{d.real(shape), d.real(shape)}, d.dim(shape)};
                   }});
  for (const char* op : {"hstack", "vstack"}) {
    cases.push_back({std::string("aten::") + op, [](Draw& d) {
                       const Sizes shape = d.shape(1);
                       return Arguments{Tensors{d.real(shape), d.real(shape)}};
                     }});
  }
  cases.push_back({"aten::meshgrid.indexing", [](Draw& d) {
                     return Arguments{
                         Tensors{d.real({d.size()}), d.real({d.size()})},
                         named("indexing", d.flag() ? "ij" : "xy")
                     };
                   }});
  cases.push_back({"aten::broadcast_tensors", [](Draw& d) {
                     const Sizes shape = d.shape(1);
                     return Arguments{Tensors{d.real(shape), d.real(d.beside(shape))}};
                   }});
}

}  // namespace

void add_index_cases(RuleCases& cases) {
  add_picks(cases);
  add_placements(cases);
  add_joins(cases);
}

}  // namespace hypershard::dtensor::property
