// Calls of matrix products, linear layers and einsum.
#include <algorithm>
#include <map>

#include "hypershard/dtensor/internal/property/rule_case.h"

namespace hypershard::dtensor::property {
namespace {

void add_matmul(RuleCases& cases, const char* op, std::int64_t left_rank, std::int64_t right_rank) {
  cases.push_back({op, [=](Draw& d) {
                     const Sizes batch = {d.size(), d.size()};
                     const std::int64_t inner = d.size();
                     const auto shape =
                         [&](std::int64_t rank, std::int64_t rows, std::int64_t columns) {
                           Sizes made(
                               batch.begin(), batch.begin() + std::max<std::int64_t>(rank - 2, 0)
                           );
                           if (rank > 2 && d.flag()) {
                             made[0] = rank == 4 ? made[0] : 1;
                           }
                           made.push_back(rows);
                           made.push_back(columns);
                           return made;
                         };
                     return Arguments{
                         d.real(left_rank == 1 ? Sizes{inner} : shape(left_rank, d.size(), inner)),
                         d.real(right_rank == 1 ? Sizes{inner} : shape(right_rank, inner, d.size()))
                     };
                   }});
}

void add_einsum(RuleCases& cases, const char* equation, const std::vector<std::string>& operands) {
  cases.push_back({"aten::einsum", [=](Draw& d) {
                     std::map<char, std::int64_t> size;
                     Tensors tensors;
                     for (const std::string& letters : operands) {
                       Sizes shape;
                       for (const char letter : letters) {
                         shape.push_back(size.try_emplace(letter, d.size()).first->second);
                       }
                       tensors.push_back(d.real(shape));
                     }
                     return Arguments{equation, tensors};
                   }});
}

}  // namespace

void add_contraction_cases(RuleCases& cases) {
  add_matmul(cases, "aten::mm", 2, 2);
  add_matmul(cases, "aten::mv", 2, 1);
  add_matmul(cases, "aten::dot", 1, 1);
  add_matmul(cases, "aten::vdot", 1, 1);
  add_matmul(cases, "aten::linalg_matmul", 3, 2);
  for (const auto& [left, right] : std::vector<std::pair<int, int>>{
           {1, 1}, {1, 2}, {2, 1}, {2, 2}, {3, 2}, {2, 3}, {3, 3}, {4, 4}, {1, 3}, {3, 1}
       }) {
    add_matmul(cases, "aten::matmul", left, right);
  }
  cases.push_back({"aten::bmm", [](Draw& d) {
                     const std::int64_t batch = d.size();
                     const std::int64_t inner = d.size();
                     return Arguments{
                         d.real({batch, d.size(), inner}), d.real({batch, inner, d.size()})
                     };
                   }});
  cases.push_back({"aten::addmm", [](Draw& d) {
                     const std::int64_t rows = d.size();
                     const std::int64_t inner = d.size();
                     const std::int64_t columns = d.size();
                     return Arguments{
                         d.real(d.beside({rows, columns})),
                         d.real({rows, inner}),
                         d.real({inner, columns}),
                         named("beta", 0.5),
                         named("alpha", 2.0)
                     };
                   }});
  cases.push_back({"aten::baddbmm", [](Draw& d) {
                     const std::int64_t batch = d.size();
                     const std::int64_t rows = d.size();
                     const std::int64_t inner = d.size();
                     const std::int64_t columns = d.size();
                     return Arguments{
                         d.real(d.beside({batch, rows, columns})),
                         d.real({batch, rows, inner}),
                         d.real({batch, inner, columns})
                     };
                   }});
  cases.push_back({"aten::addmv", [](Draw& d) {
                     const std::int64_t rows = d.size();
                     const std::int64_t inner = d.size();
                     return Arguments{d.real({rows}), d.real({rows, inner}), d.real({inner})};
                   }});
  for (const bool has_bias : {false, true}) {
    cases.push_back({"aten::linear", [has_bias](Draw& d) {
                       Sizes shape = d.shape(1);
                       const std::int64_t out = d.size();
                       const std::int64_t in = shape.back();
                       return Arguments{
                           d.real(shape),
                           d.real({out, in}),
                           has_bias ? Argument(d.real({out})) : none()
                       };
                     }});
  }
  for (const char* op : {"aten::outer", "aten::ger"}) {
    cases.push_back({op, [](Draw& d) { return Arguments{d.real({d.size()}), d.real({d.size()})}; }}
    );
  }
  add_einsum(cases, "bij,bjk->bik", {"bij", "bjk"});
  add_einsum(cases, "bhqd,bhkd->bhqk", {"bhqd", "bhkd"});
  add_einsum(cases, "...i,oi->...o", {"abi", "oi"});
  add_einsum(cases, "ij,jk,kl->il", {"ij", "jk", "kl"});
  add_einsum(cases, "ij,jk", {"ij", "jk"});
  add_einsum(cases, "ijk->ki", {"ijk"});
}

}  // namespace hypershard::dtensor::property
