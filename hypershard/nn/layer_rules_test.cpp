// The fused operators' layout rules against the operators themselves, on simulated ranks.
#include <gtest/gtest.h>

#include "hypershard/dtensor/internal/property/rule_check.h"
#include "hypershard/layout/mesh.h"
#include "hypershard/nn/attention.h"
#include "hypershard/nn/cross_entropy.h"
#include "hypershard/nn/embedding.h"
#include "hypershard/nn/rms_norm.h"
#include "hypershard/nn/rotary.h"
#include "hypershard/nn/row_part.h"
#include "hypershard/nn/swiglu.h"

namespace hypershard::nn {
namespace {

using dtensor::property::Arguments;
using dtensor::property::CheckResult;
using dtensor::property::Compare;
using dtensor::property::Draw;
using dtensor::property::Offsets;
using dtensor::property::placed;
using dtensor::property::RuleCase;
using dtensor::property::RuleCases;
using dtensor::property::Sizes;
using dtensor::property::Tensors;

constexpr std::int64_t kClasses = 7;

RuleCases layer_cases() {
  return {
      {"hypershard::attention_forward",
       [](Draw& d) {
         const std::int64_t shared = 1 + d.number(2);
         const Sizes keys = {1 + d.number(5), 1 + d.number(5), d.even(), 8};
         return Arguments{
             d.real({keys[0], keys[1], shared * keys[2], 8}), d.real(keys), d.real(keys)
         };
       }},
      {"hypershard::cross_entropy_forward",
       [](Draw& d) {
         const std::int64_t rows = d.even();
         return Arguments{d.real({rows, kClasses}), d.whole_numbers({rows}, kClasses)};
       }},
      // What ranks exchange is not simulated: values are compared in row_part_test.cpp.
      {"hypershard::cross_entropy_part_forward",
       [](Draw& d) {
         const std::int64_t rows = d.even();
         std::vector<int> axes;  // on which the projection's rows are cut
         for (const int axis : {0, 1}) {
           if (d.flag()) {
             axes.push_back(axis);
           }
         }
         const auto part = [axes](const Tensors& local, const Offsets& offsets) {
           return c10::IValue(c10::make_intrusive<RowPart>(
               offsets[0][1], local[0].size(1), kClasses, axes, nullptr
           ));
         };
         return Arguments{
             d.real({rows, kClasses}), d.whole_numbers({rows}, kClasses), placed(part)
         };
       },
       Compare::kShapes},
      {"hypershard::embedding_forward",
       [](Draw& d) {
         const std::int64_t rows = d.even();
         const Sizes indices = d.shape(1);
         const auto first_row = [](const Tensors&, const Offsets& offsets) {
           return c10::IValue(offsets[0][0]);
         };
         return Arguments{
             d.real({rows, d.even()}), d.whole_numbers(indices, rows), placed(first_row)
         };
       }},
      {"hypershard::embedding_forward",
       [](Draw& d) {
         const std::int64_t rows = d.size();
         const Sizes indices = d.shape(1);
         return Arguments{d.real({rows, d.even()}), d.whole_numbers(indices, rows), c10::IValue()};
       }},
      {"hypershard::rms_norm_forward",
       [](Draw& d) {
         const Sizes shape = d.shape(2, 4);
         return Arguments{d.real(shape), d.real({shape.back()}), 1e-5};
       }},
      {"hypershard::rotate",
       [](Draw& d) {
         const Sizes shape = {d.size(), d.size(), d.size(), 8};
         return Arguments{d.real(shape), d.real({shape[1], 4}), d.real({shape[1], 4}), d.flag()};
       }},
      {"hypershard::swiglu_forward",
       [](Draw& d) {
         const Sizes shape = d.shape(1);
         return Arguments{d.real(shape), d.real(shape)};
       }}
  };
}

/// A static library leaves out what nobody calls, its operators too.
void call_every_layer() {
  const at::Tensor one = at::ones({1, 1, 1, 8}, at::kDouble);
  EXPECT_EQ(causal_attention(one, one, one).dim(), 4);
  EXPECT_EQ(rms_norm(one, one.flatten(), 1e-5).dim(), 4);
  EXPECT_EQ(rotate(one, make_rotary_table(1, 8, 1e4, at::kDouble, at::kCPU)).dim(), 4);
  EXPECT_EQ(nn::embedding(one.view({1, 8}), at::zeros({2}, at::kLong)).dim(), 2);
  EXPECT_EQ(swiglu(one, one).dim(), 4);
  EXPECT_EQ(cross_entropy(one.view({1, 8}), at::zeros({1}, at::kLong)).dim(), 0);
  const auto part = c10::make_intrusive<RowPart>(0, 8, 9, std::vector<int>{0}, nullptr);
  EXPECT_EQ(cross_entropy(one.view({1, 8}), at::zeros({1}, at::kLong), part).dim(), 0);
}

TEST(LayerRulesTest, AcceptedLayoutsGatherToThePlainResult) {
  using layout::DeviceMesh;
  using layout::Topology;
  call_every_layer();
  for (const DeviceMesh& mesh :
       {DeviceMesh({{"tp", 2}}, Topology::single_supernode(2)),
        DeviceMesh({{"tp", 4}}, Topology::single_supernode(4)),
        DeviceMesh({{"dp", 2}, {"tp", 2}}, Topology::single_supernode(4))}) {
    for (const RuleCase& rule_case : layer_cases()) {
      const CheckResult result = dtensor::property::check_rule(rule_case, mesh, 400, 25);
      EXPECT_EQ(result.fault, "") << to_text(mesh);
      EXPECT_GT(result.accepted, 5) << rule_case.op << " on " << to_text(mesh);
      EXPECT_GT(result.refused, 0) << rule_case.op << " on " << to_text(mesh);
    }
  }
}

}  // namespace
}  // namespace hypershard::nn
