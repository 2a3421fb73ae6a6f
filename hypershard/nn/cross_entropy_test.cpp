// Tests the fused cross entropy against ATen's and against differences.
#include "hypershard/nn/cross_entropy.h"

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

TEST(CrossEntropyTest, EqualsAtenForEveryDtypeAndWidth) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const std::int64_t classes : {4, 8, 37, 256}) {
      const auto logits =
          (random_tensor({2, 3, classes}, at::kDouble, 1) * 5).to(dtype).requires_grad_(true);
      const auto wide = logits.detach().to(at::kDouble).requires_grad_(true);
      const auto targets = at::tensor({0, 3, 1, -100, 2, 3}, at::kLong).view({2, 3});
      const auto loss = cross_entropy(logits, targets);
      const auto expected = at::cross_entropy_loss(wide.view({6, classes}), targets.view({6}));
      EXPECT_EQ(loss.scalar_type(), dtype == at::kDouble ? at::kDouble : at::kFloat);
      EXPECT_TRUE(near(loss, expected, dtype == at::kDouble ? 1e-13 : 1e-6))
          << dtype << " classes " << classes;
      (loss * 3).backward();
      (expected * 3).backward();
      const double tolerance = dtype == at::kDouble ? 1e-14 : dtype == at::kFloat ? 1e-6 : 5e-3;
      EXPECT_EQ(logits.grad().scalar_type(), dtype);
      EXPECT_TRUE(near(logits.grad(), wide.grad(), tolerance)) << dtype << " classes " << classes;
    }
  }
}

TEST(CrossEntropyTest, EqualLogitsGiveTheLogarithmOfTheirNumber) {
  const auto loss = cross_entropy(at::full({3, 256}, 7.0F), at::tensor({0, 100, 255}, at::kLong));
  EXPECT_NEAR(loss.item<double>(), std::log(256.0), 1e-6);
}

TEST(CrossEntropyTest, LargeLogitsStayFinite) {
  const auto logits = at::tensor({1e30F, 0.0F, -1e30F, 5.0F}).view({1, 4}).requires_grad_(true);
  const auto loss = cross_entropy(logits, at::tensor({0}, at::kLong));
  EXPECT_EQ(loss.item<double>(), 0);
  loss.backward();
  EXPECT_TRUE(near(logits.grad(), at::zeros({1, 4}), 0));
}

TEST(CrossEntropyTest, ANanLogitShows) {
  const auto logits = at::zeros({2, 16});
  logits[1][3] = std::nan("");
  EXPECT_TRUE(std::isnan(cross_entropy(logits, at::tensor({0, 1}, at::kLong)).item<double>()));
}

TEST(CrossEntropyTest, NoRowLeftGivesNan) {
  EXPECT_TRUE(
      std::isnan(cross_entropy(at::zeros({2, 4}), at::tensor({-1, -100}, at::kLong)).item<double>())
  );
}

TEST(CrossEntropyTest, GradientsAgreeWithDifferences) {
  const auto logits = random_tensor({3, 5}, at::kDouble, 1).requires_grad_(true);
  const auto targets = at::tensor({4, -100, 2}, at::kLong);
  testing::check_gradients([&](const auto& in) { return cross_entropy(in[0], targets); }, {logits});
}

TEST(CrossEntropyTest, Bf16LogitsAreNotCopied) {
  const auto logits = random_tensor({4, 64}, at::kBFloat16, 1).requires_grad_(true);
  const auto targets = at::tensor({0, 1, 2, 3}, at::kLong);
  testing::OperatorTrace trace;
  cross_entropy(logits, targets).backward();
  EXPECT_EQ(trace.count_movements(), 0);
  EXPECT_EQ(trace.count("hypershard::cross_entropy_forward"), 1);
}

TEST(CrossEntropyTest, SecondDerivativesWork) {
  const auto logits = random_tensor({3, 5}, at::kDouble, 1).requires_grad_(true);
  const auto reference = random_tensor({3, 5}, at::kDouble, 1).requires_grad_(true);
  const auto targets = at::tensor({4, 0, 2}, at::kLong);
  torch::autograd::grad({cross_entropy(logits, targets)}, {logits}, {}, true, true)[0]
      .square()
      .sum()
      .backward();
  torch::autograd::grad(
      {at::cross_entropy_loss(reference, targets)}, {reference}, {}, true, true
  )[0]
      .square()
      .sum()
      .backward();
  EXPECT_TRUE(near(logits.grad(), reference.grad(), 1e-12));
}

TEST(CrossEntropyTest, ATargetBeyondTheClassesIsNamedWithItsRow) {
  HS_EXPECT_THROWN(
      InvalidArgument,
      cross_entropy(at::zeros({2, 4}), at::tensor({0, 4}, at::kLong)),
      "target of row 1 is 4 (expected below the number of classes, 4)"
  );
  HS_EXPECT_THROWN(
      InvalidArgument,
      cross_entropy(at::zeros({2, 4}), at::zeros({3}, at::kLong)),
      "do not fit targets"
  );
  HS_EXPECT_THROWN(
      InvalidArgument, cross_entropy(at::zeros({2, 4}), at::zeros({2})), "expected Long"
  );
}

}  // namespace
}  // namespace hypershard::nn
