// Tests the fused normalisation against ATen's and against differences, with and without slot.
#include "hypershard/nn/rms_norm.h"

#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include "hypershard/core/error.h"
#include "hypershard/nn/recompute.h"
#include "hypershard/nn/test_support.h"

namespace hypershard::nn {
namespace {

using testing::attach_slot;
using testing::near;
using testing::OperatorTrace;
using testing::random_tensor;
using testing::same_bits;

constexpr double kEps = 1e-5;

double tolerance_of(at::ScalarType dtype) {
  return dtype == at::kDouble  ? 1e-12
         : dtype == at::kFloat ? 2e-6
                               : 2e-2;  // one rounding of bf16 is 2^-9 relative
}

TEST(RmsNormTest, EqualsAtenForEveryDtypeWidthAndShape) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const std::int64_t dim : {1, 3, 8, 16, 37, 192}) {
      const auto x = random_tensor({3, 5, dim}, dtype, 1).requires_grad_(true);
      const auto weight = random_tensor({dim}, dtype, 2).requires_grad_(true);
      const auto wide_x = x.detach().to(at::kDouble).requires_grad_(true);
      const auto wide_weight = weight.detach().to(at::kDouble).requires_grad_(true);
      const auto grad = random_tensor({3, 5, dim}, dtype, 3);
      const auto y = nn::rms_norm(x, weight, kEps);
      const auto expected = at::rms_norm(wide_x, {dim}, wide_weight, kEps);
      const double tolerance = tolerance_of(dtype);
      EXPECT_EQ(y.scalar_type(), dtype);
      EXPECT_TRUE(near(y, expected, tolerance)) << dtype << " dim " << dim;
      y.backward(grad);
      expected.backward(grad.to(at::kDouble));
      EXPECT_TRUE(near(x.grad(), wide_x.grad(), 2 * tolerance)) << dtype << " dim " << dim;
      EXPECT_TRUE(near(weight.grad(), wide_weight.grad(), 2 * tolerance))
          << dtype << " dim " << dim;
    }
  }
}

TEST(RmsNormTest, GradientsAgreeWithDifferences) {
  const auto x = random_tensor({2, 3, 11}, at::kDouble, 1).requires_grad_(true);
  const auto weight = random_tensor({11}, at::kDouble, 2).requires_grad_(true);
  testing::check_gradients(
      [](const auto& in) { return nn::rms_norm(in[0], in[1], kEps); }, {x, weight}
  );
}

TEST(RmsNormTest, SlotGetsTheSameBitsAsThePlainPathAndAddsLater) {
  const auto x = random_tensor({7, 33}, at::kFloat, 1);
  const auto grad = random_tensor({7, 33}, at::kFloat, 3);
  const auto plain = random_tensor({33}, at::kFloat, 2).requires_grad_(true);
  const auto fused = random_tensor({33}, at::kFloat, 2).requires_grad_(true);
  const auto slot = attach_slot(fused, at::kFloat);
  nn::rms_norm(x, plain, kEps).backward(grad);
  nn::rms_norm(x, fused, kEps).backward(grad);
  EXPECT_TRUE(same_bits(slot->buffer, plain.grad()));
  nn::rms_norm(x, plain, kEps).backward(grad);
  nn::rms_norm(x, fused, kEps).backward(grad);
  EXPECT_TRUE(near(slot->buffer, plain.grad(), 1e-6));
  EXPECT_FALSE(fused.grad().defined());
  EXPECT_EQ(slot->claims, 2);
}

TEST(RmsNormTest, Bf16ComputeFillsAnFp32SlotWithoutRounding) {
  const auto x = random_tensor({64, 40}, at::kBFloat16, 1);
  const auto grad = random_tensor({64, 40}, at::kBFloat16, 3);
  const auto weight = random_tensor({40}, at::kBFloat16, 2).requires_grad_(true);
  const auto slot = attach_slot(weight, at::kFloat);
  const auto exact = weight.detach().to(at::kDouble).requires_grad_(true);
  nn::rms_norm(x, weight, kEps).backward(grad);
  at::rms_norm(x.to(at::kDouble), {40}, exact, kEps).backward(grad.to(at::kDouble));
  EXPECT_TRUE(near(slot->buffer, exact.grad(), 1e-5));
}

TEST(RmsNormTest, SlotsOfOtherDtypesAreRoundedOnce) {
  for (const auto slot_dtype : {at::kBFloat16, at::kDouble}) {
    const auto x = random_tensor({7, 33}, at::kFloat, 1);
    const auto weight = random_tensor({33}, at::kFloat, 2).requires_grad_(true);
    const auto plain = random_tensor({33}, at::kFloat, 2).requires_grad_(true);
    const auto slot = attach_slot(weight, slot_dtype);
    nn::rms_norm(x, weight, kEps).sum().backward();
    nn::rms_norm(x, plain, kEps).sum().backward();
    EXPECT_TRUE(same_bits(slot->buffer, plain.grad().to(slot_dtype)));
  }
}

TEST(RmsNormTest, MixedDtypesAndStridesFallBackCorrectly) {
  const auto x = random_tensor({6, 4}, at::kBFloat16, 1);
  const auto weight = random_tensor({4}, at::kFloat, 2);
  const auto y = nn::rms_norm(x, weight, kEps);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(near(y, at::rms_norm(x.to(at::kDouble), {4}, weight.to(at::kDouble), kEps), 2e-2));
  const auto strided = random_tensor({4, 6}, at::kDouble, 1).t();
  const auto wide = weight.to(at::kDouble);
  EXPECT_TRUE(near(nn::rms_norm(strided, wide, kEps), at::rms_norm(strided, {4}, wide, kEps), 1e-12)
  );
  EXPECT_EQ(
      nn::rms_norm(at::empty({0, 4}, at::kDouble), wide, kEps).sizes(), at::IntArrayRef({0, 4})
  );
}

TEST(RmsNormTest, FrozenWeightAndFrozenInputWork) {
  const auto x = random_tensor({6, 4}, at::kDouble, 1).requires_grad_(true);
  const auto weight = random_tensor({4}, at::kDouble, 2);
  const auto slot = attach_slot(weight, at::kDouble);
  nn::rms_norm(x, weight, kEps).sum().backward();
  EXPECT_TRUE(x.grad().defined());
  EXPECT_EQ(slot->claims, 0);
}

TEST(RmsNormTest, ThreadsGiveTheSameBitsEveryTime) {
  const int threads = at::get_num_threads();
  at::set_num_threads(3);
  const auto x = random_tensor({512, 96}, at::kFloat, 1);
  const auto grad = random_tensor({512, 96}, at::kFloat, 3);
  at::Tensor first;
  for (int i = 0; i < 5; ++i) {
    const auto weight = random_tensor({96}, at::kFloat, 2).requires_grad_(true);
    nn::rms_norm(x, weight, kEps).backward(grad);
    if (i == 0) {
      first = weight.grad();
    }
    EXPECT_TRUE(same_bits(weight.grad(), first));
  }
  at::set_num_threads(threads);
  const auto alone = random_tensor({96}, at::kFloat, 2).requires_grad_(true);
  nn::rms_norm(x, alone, kEps).backward(grad);
  EXPECT_TRUE(near(first, alone.grad(), 1e-4));  // sums of 512 terms in another order
}

TEST(RmsNormTest, TheFusedPathMovesNothing) {
  const auto x = random_tensor({7, 32}, at::kFloat, 1).requires_grad_(true);
  const auto grad = random_tensor({7, 32}, at::kFloat, 3);
  const auto weight = random_tensor({32}, at::kFloat, 2).requires_grad_(true);
  const auto slot = attach_slot(weight, at::kFloat);
  OperatorTrace trace;
  nn::rms_norm(x, weight, kEps).backward(grad);
  EXPECT_EQ(trace.count_movements(), 0);
  EXPECT_EQ(trace.count("hypershard::rms_norm_forward"), 1);
  EXPECT_EQ(trace.count("hypershard::rms_norm_backward"), 1);
  EXPECT_EQ(slot->claims, 1);
}

TEST(RmsNormTest, WorksInsideRecomputeAndOnMeta) {
  const auto x = random_tensor({7, 32}, at::kFloat, 1).requires_grad_(true);
  const auto plain = random_tensor({32}, at::kFloat, 2).requires_grad_(true);
  const auto fused = random_tensor({32}, at::kFloat, 2).requires_grad_(true);
  const auto slot = attach_slot(fused, at::kFloat);
  nn::rms_norm(x, plain, kEps).square().sum().backward();
  recompute([&](const at::Tensor& in) { return nn::rms_norm(in, fused, kEps).square(); }, x)
      .sum()
      .backward();
  EXPECT_TRUE(same_bits(slot->buffer, plain.grad()));
  const auto meta = nn::rms_norm(at::empty({2, 4}, at::kMeta), at::empty({4}, at::kMeta), kEps);
  EXPECT_TRUE(meta.is_meta());
  EXPECT_EQ(meta.sizes(), at::IntArrayRef({2, 4}));
}

TEST(RmsNormTest, SecondDerivativesWorkWithoutSlot) {
  const auto ours = random_tensor({3, 5}, at::kDouble, 1).requires_grad_(true);
  const auto theirs = random_tensor({3, 5}, at::kDouble, 1).requires_grad_(true);
  const auto weight = random_tensor({5}, at::kDouble, 2);
  torch::autograd::grad({nn::rms_norm(ours, weight, kEps).pow(3).sum()}, {ours}, {}, true, true)[0]
      .sum()
      .backward();
  torch::autograd::grad(
      {at::rms_norm(theirs, {5}, weight, kEps).pow(3).sum()}, {theirs}, {}, true, true
  )[0]
      .sum()
      .backward();
  EXPECT_TRUE(near(ours.grad(), theirs.grad(), 1e-10));
}

TEST(RmsNormTest, ShapesThatDoNotFitAreNamed) {
  HS_EXPECT_THROWN(
      InvalidArgument,
      nn::rms_norm(at::ones({2, 5}), at::ones({4}), kEps),
      "shape [2, 5] does not fit weight of shape [4]"
  );
  HS_EXPECT_THROWN(InvalidArgument, RmsNorm(0), "dim must be positive");
}

TEST(RmsNormTest, TheLayerStartsAsPlainNormalisation) {
  RmsNorm layer(RmsNormOptions{.dim = 4, .eps = 0, .dtype = at::kDouble});
  const auto y = layer->forward(at::tensor({1.0, 1.0, 1.0, 1.0}, at::kDouble) * 7);
  EXPECT_TRUE(near(y, at::ones({4}), 1e-15));
}

}  // namespace
}  // namespace hypershard::nn
