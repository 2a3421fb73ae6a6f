// Why: a matcher that accepts too much hides bugs, and its text is what a failing test shows.
#include "hypershard/testing/tensor_matchers.h"

#include <limits>
#include <string>

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <ATen/Functions.h>

namespace hypershard::testing {
namespace {

TEST(TensorMatchersTest, EqualMeansDtypeSizesAndBits) {
  const at::Tensor a = at::arange(6, at::kFloat).view({2, 3});
  EXPECT_EQ(tensor_difference(a, a.clone()), "");
  EXPECT_EQ(tensor_difference(a.t(), a.t().contiguous()), "");
  EXPECT_NE(
      tensor_difference(a, a.to(at::kDouble)).find("dtype Float (expected Double)"),
      std::string::npos
  );
  EXPECT_NE(
      tensor_difference(a, a.view({6})).find("sizes [2, 3] (expected [6])"), std::string::npos
  );
  EXPECT_NE(tensor_difference(at::zeros({1}), at::zeros({1}).neg()), "") << "-0 has other bits";
  EXPECT_NE(tensor_difference(at::Tensor(), a), "");
  const at::Tensor nan = at::full({2}, std::numeric_limits<double>::quiet_NaN());
  EXPECT_EQ(tensor_difference(nan, nan.clone()), "");
}

TEST(TensorMatchersTest, NamesTheWorstElement) {
  const at::Tensor expected = at::ones({4, 5});
  const at::Tensor actual = expected.clone();
  actual[1][2] = 1.25;
  actual[3][4] = 0.5;
  EXPECT_EQ(
      tensor_difference(actual, expected),
      "2 of 20 elements differ; worst at [3, 4]: 0.5 (expected 1); max abs error 0.5, max rel "
      "error 0.5"
  );
}

TEST(TensorMatchersTest, CloseIsWithinTheTolerance) {
  const at::Tensor expected = at::full({3}, 10.0);
  const at::Tensor actual = at::full({3}, 10.5);
  EXPECT_EQ(tensor_difference(actual, expected, {.relative = 0.05, .absolute = 0.0}), "");
  EXPECT_EQ(tensor_difference(actual, expected, {.relative = 0.0, .absolute = 0.5}), "");
  const std::string text = tensor_difference(actual, expected, {.relative = 0.0, .absolute = 0.25});
  EXPECT_NE(text.find("200 % of the tolerance"), std::string::npos) << text;
  const at::Tensor nan = at::full({3}, std::numeric_limits<double>::quiet_NaN());
  EXPECT_NE(tensor_difference(nan, expected, {.relative = 1, .absolute = 1e9}), "");
  EXPECT_NE(tensor_difference(expected, nan, {.relative = 1, .absolute = 1e9}), "");
  EXPECT_EQ(tensor_difference(nan, nan, {}), "");
}

TEST(TensorMatchersTest, MacrosFailTheTestWithTheText) {
  EXPECT_NONFATAL_FAILURE(EXPECT_TENSORS_EQUAL(at::ones({2}), at::zeros({2})), "2 of 2 elements");
  EXPECT_NONFATAL_FAILURE(
      EXPECT_TENSORS_CLOSE(at::ones({2}), at::zeros({2}), 0.1, 0.1), "2 of 2 elements"
  );
  EXPECT_TENSORS_CLOSE(at::ones({2}), at::full({2}, 1.001), 0.01, 0);
}

}  // namespace
}  // namespace hypershard::testing
