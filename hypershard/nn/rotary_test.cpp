// Tests the fused rotation against its formula, and that it is a rotation.
#include "hypershard/nn/rotary.h"

#include <cmath>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "hypershard/core/error.h"
#include "hypershard/nn/test_support.h"

namespace hypershard::nn {
namespace {

using testing::near;
using testing::random_tensor;
using testing::same_bits;

RotaryTable table_for(std::int64_t positions, std::int64_t head_dim, at::ScalarType dtype) {
  return make_rotary_table(positions, head_dim, 10000.0, dtype, at::kCPU);
}

// The formula, element by element.
at::Tensor rotated_by_hand(const at::Tensor& x) {
  const auto y = at::empty_like(x, at::TensorOptions().dtype(at::kDouble));
  const auto head_dim = x.size(3);
  for (std::int64_t b = 0; b < x.size(0); ++b) {
    for (std::int64_t t = 0; t < x.size(1); ++t) {
      for (std::int64_t h = 0; h < x.size(2); ++h) {
        for (std::int64_t i = 0; i < head_dim / 2; ++i) {
          const double angle =
              static_cast<double>(t) *
              std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
          const double a = x[b][t][h][i].item<double>();
          const double c = x[b][t][h][i + head_dim / 2].item<double>();
          y[b][t][h][i] = a * std::cos(angle) - c * std::sin(angle);
          y[b][t][h][i + head_dim / 2] = a * std::sin(angle) + c * std::cos(angle);
        }
      }
    }
  }
  return y;
}

TEST(RotaryTest, EqualsTheFormulaForEveryDtypeAndWidth) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const std::int64_t head_dim : {2, 6, 16, 20}) {
      const auto x = random_tensor({2, 3, 2, head_dim}, dtype, 1);
      const auto y = rotate(x, table_for(3, head_dim, dtype));
      EXPECT_EQ(y.scalar_type(), dtype);
      EXPECT_TRUE(y.is_contiguous());
      const double tolerance = dtype == at::kDouble ? 1e-14 : dtype == at::kFloat ? 1e-6 : 1e-2;
      EXPECT_TRUE(near(y, rotated_by_hand(x), tolerance)) << dtype << " head_dim " << head_dim;
    }
  }
}

TEST(RotaryTest, GradientIsTheRotationBackBitForBit) {
  const auto x = random_tensor({2, 5, 3, 8}, at::kDouble, 1).requires_grad_(true);
  const auto table = table_for(5, 8, at::kDouble);
  testing::check_gradients([&](const auto& in) { return rotate(in[0], table); }, {x});
  x.mutable_grad() = at::Tensor();
  const auto y = rotate(x, table);
  y.backward(y.detach());
  EXPECT_TRUE(near(x.grad(), x, 1e-14)) << "rotating there and back is the identity";
}

TEST(RotaryTest, ReadsStridedHeadsWithoutACopy) {
  const auto x = random_tensor({2, 3, 5, 8}, at::kFloat, 1);  // [batch, heads, positions, head_dim]
  const auto view = x.transpose(1, 2);
  const auto table = table_for(5, 8, at::kFloat);
  testing::OperatorTrace trace;
  const auto y = rotate(view, table);
  EXPECT_EQ(trace.count_movements(), 0);
  EXPECT_TRUE(same_bits(y, rotate(view.contiguous(), table)));
}

TEST(RotaryTest, PositionsFollowTheNarrowedTable) {
  const auto x = random_tensor({1, 6, 2, 8}, at::kFloat, 1);
  const auto table = table_for(6, 8, at::kFloat);
  const auto whole = rotate(x, table);
  const auto tail = rotate(x.narrow(1, 4, 2), table.narrow(4, 2));
  EXPECT_TRUE(same_bits(tail, whole.narrow(1, 4, 2)));
}

TEST(RotaryTest, ScoresDependOnDistanceOnly) {
  const auto q = random_tensor({1, 1, 1, 16}, at::kDouble, 1).expand({1, 9, 1, 16}).contiguous();
  const auto k = random_tensor({1, 1, 1, 16}, at::kDouble, 2).expand({1, 9, 1, 16}).contiguous();
  const auto table = table_for(9, 16, at::kDouble);
  const auto scores =
      at::matmul(rotate(q, table).view({9, 16}), rotate(k, table).view({9, 16}).t());
  EXPECT_NEAR(scores[2][5].item<double>(), scores[5][8].item<double>(), 1e-12);
  EXPECT_GT(std::abs(scores[2][5].item<double>() - scores[2][6].item<double>()), 1e-6);
}

TEST(RotaryTest, SecondDerivativesWork) {
  const auto x = random_tensor({1, 2, 1, 4}, at::kDouble, 1).requires_grad_(true);
  const auto table = table_for(2, 4, at::kDouble);
  torch::autograd::grad({rotate(x, table).square().sum()}, {x}, {}, true, true)[0].sum().backward();
  EXPECT_TRUE(near(x.grad(), at::full_like(x, 2.0), 1e-13)) << "|rotated x|^2 = |x|^2";
}

TEST(RotaryTest, ShapesThatDoNotFitAreNamed) {
  HS_EXPECT_THROWN(InvalidArgument, table_for(4, 3, at::kFloat), "even (got 3)");
  HS_EXPECT_THROWN(
      InvalidArgument,
      rotate(at::ones({1, 5, 2, 8}), table_for(4, 8, at::kFloat)),
      "does not fit a table of shape [4, 4]"
  );
}

}  // namespace
}  // namespace hypershard::nn
