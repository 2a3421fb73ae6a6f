// Tests the fused gated activation against ATen's operators and against differences.
#include "hypershard/nn/swiglu.h"

#include <limits>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "hypershard/core/error.h"
#include "hypershard/nn/test_support.h"

namespace hypershard::nn {
namespace {

using testing::near;
using testing::random_tensor;

TEST(SwigluTest, EqualsAtenForEveryDtypeAndLength) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const double tolerance = dtype == at::kDouble ? 1e-13 : dtype == at::kFloat ? 1e-6 : 2e-2;
    for (const std::int64_t n : {0, 1, 7, 8, 9, 40000}) {
      const auto gate = (random_tensor({n}, at::kDouble, 1) * 4).to(dtype).requires_grad_(true);
      const auto up = random_tensor({n}, dtype, 2).requires_grad_(true);
      const auto wide_gate = gate.detach().to(at::kDouble).requires_grad_(true);
      const auto wide_up = up.detach().to(at::kDouble).requires_grad_(true);
      const auto grad = random_tensor({n}, dtype, 3);
      const auto h = swiglu(gate, up);
      const auto expected = at::silu(wide_gate) * wide_up;
      EXPECT_EQ(h.scalar_type(), dtype);
      EXPECT_TRUE(near(h, expected, tolerance)) << dtype << " n " << n;
      h.backward(grad);
      expected.backward(grad.to(at::kDouble));
      EXPECT_TRUE(near(gate.grad(), wide_gate.grad(), tolerance)) << dtype << " n " << n;
      EXPECT_TRUE(near(up.grad(), wide_up.grad(), tolerance)) << dtype << " n " << n;
    }
  }
}

TEST(SwigluTest, StaysFiniteAndRightAtTheEnds) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const auto gate =
        at::tensor({-1e30, -200.0, -88.5, -30.0, 0.0, 30.0, 88.5, 200.0, 1e30}, at::kDouble)
            .to(dtype);
    const auto h = swiglu(gate, at::ones_like(gate));
    EXPECT_TRUE(near(h, at::silu(gate.to(at::kDouble)), 1e-6));
  }
  const auto nan = at::full({9}, std::numeric_limits<double>::quiet_NaN(), at::kFloat);
  EXPECT_TRUE(swiglu(nan, at::ones({9})).isnan().all().item<bool>()) << "a NaN must not be hidden";
}

TEST(SwigluTest, GradientsAgreeWithDifferences) {
  const auto gate = random_tensor({3, 5}, at::kDouble, 1).requires_grad_(true);
  const auto up = random_tensor({3, 5}, at::kDouble, 2).requires_grad_(true);
  testing::check_gradients([](const auto& in) { return swiglu(in[0], in[1]); }, {gate, up});
}

TEST(SwigluTest, TakesAnyStrides) {
  const auto gate = random_tensor({5, 3}, at::kDouble, 1).t();
  const auto up = random_tensor({3, 10}, at::kDouble, 2).slice(1, 0, 10, 2);
  EXPECT_TRUE(near(swiglu(gate, up), at::silu(gate) * up, 1e-13));
}

TEST(SwigluTest, SecondDerivativesWork) {
  const auto gate = random_tensor({5}, at::kDouble, 1).requires_grad_(true);
  const auto reference = random_tensor({5}, at::kDouble, 1).requires_grad_(true);
  const auto up = random_tensor({5}, at::kDouble, 2);
  torch::autograd::grad({swiglu(gate, up).square().sum()}, {gate}, {}, true, true)[0]
      .sum()
      .backward();
  torch::autograd::grad({(at::silu(reference) * up).square().sum()}, {reference}, {}, true, true)[0]
      .sum()
      .backward();
  EXPECT_TRUE(near(gate.grad(), reference.grad(), 1e-12));
}

TEST(SwigluTest, DifferentShapesOrDtypesAreNamed) {
  HS_EXPECT_THROWN(InvalidArgument, swiglu(at::ones({2}), at::ones({3})), "Float[2] and Float[3]");
  HS_EXPECT_THROWN(
      InvalidArgument, swiglu(at::ones({2}), at::ones({2}, at::kDouble)), "Float[2] and Double[2]"
  );
}

}  // namespace
}  // namespace hypershard::nn
