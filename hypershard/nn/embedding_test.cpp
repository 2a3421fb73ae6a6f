// Tests that the embedding equals libtorch's with and without slot.
#include "hypershard/nn/embedding.h"

#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
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

// Index 3 comes three times, row 4 never.
at::Tensor some_indices() {
  return at::tensor({3, 0, 3, 1, 2, 3}, at::kLong).view({2, 3});
}

TEST(EmbeddingTest, EqualsAtenWithoutSlot) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const auto ours = random_tensor({5, 37}, dtype, 1).requires_grad_(true);
    const auto theirs = random_tensor({5, 37}, dtype, 1).requires_grad_(true);
    const auto grad = random_tensor({2, 3, 37}, dtype, 2);
    const auto y = nn::embedding(ours, some_indices());
    const auto expected = at::embedding(theirs, some_indices());
    EXPECT_TRUE(same_bits(y, expected));
    y.backward(grad);
    expected.backward(grad);
    EXPECT_TRUE(same_bits(ours.grad(), theirs.grad()));
  }
}

TEST(EmbeddingTest, GradientsAgreeWithDifferences) {
  const auto weight = random_tensor({5, 3}, at::kDouble, 1).requires_grad_(true);
  testing::check_gradients(
      [](const auto& in) { return nn::embedding(in[0], some_indices()); }, {weight}
  );
}

TEST(EmbeddingTest, FirstClaimZeroesTheSlotAndLaterOnesAdd) {
  const auto weight = random_tensor({5, 9}, at::kFloat, 1).requires_grad_(true);
  const auto plain = random_tensor({5, 9}, at::kFloat, 1).requires_grad_(true);
  const auto grad = random_tensor({2, 3, 9}, at::kFloat, 2);
  const auto slot = attach_slot(weight, at::kFloat);
  nn::embedding(plain, some_indices()).backward(grad);
  nn::embedding(weight, some_indices()).backward(grad);
  EXPECT_TRUE(same_bits(slot->buffer, plain.grad()));
  EXPECT_EQ(slot->buffer[4].abs().sum().item<double>(), 0) << "a row without index must be zeroed";
  nn::embedding(plain, some_indices()).backward(grad);
  nn::embedding(weight, some_indices()).backward(grad);
  EXPECT_TRUE(near(slot->buffer, plain.grad(), 1e-6));
  EXPECT_EQ(slot->claims, 2);
  EXPECT_FALSE(weight.grad().defined());
}

TEST(EmbeddingTest, Bf16RowsAddUpInAnFp32SlotWithoutRounding) {
  const auto weight = random_tensor({5, 19}, at::kBFloat16, 1).requires_grad_(true);
  const auto grad = random_tensor({2, 3, 19}, at::kBFloat16, 2);
  const auto slot = attach_slot(weight, at::kFloat);
  const auto y = nn::embedding(weight, some_indices());
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  y.backward(grad);
  const auto exact =
      at::zeros({5, 19}, at::kDouble)
          .index_add_(0, some_indices().view({-1}), grad.to(at::kDouble).view({6, 19}));
  EXPECT_TRUE(near(slot->buffer, exact, 1e-6));
}

TEST(EmbeddingTest, EverySlotDtypeTakesEveryGradientDtype) {
  for (const auto slot_dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      const auto weight = random_tensor({5, 11}, dtype, 1).requires_grad_(true);
      const auto grad = at::ones({2, 3, 11}, at::TensorOptions().dtype(dtype));
      const auto slot = attach_slot(weight, slot_dtype);
      nn::embedding(weight, some_indices()).backward(grad);
      EXPECT_TRUE(same_bits(
          slot->buffer.to(at::kDouble).select(1, 10),
          at::tensor({1.0, 1.0, 1.0, 3.0, 0.0}, at::kDouble)
      )) << slot_dtype
         << " from " << dtype;
    }
  }
}

TEST(EmbeddingTest, TheFusedPathMakesNoTemporaryAndMovesNothing) {
  const auto weight = random_tensor({5, 9}, at::kFloat, 1).requires_grad_(true);
  const auto grad = random_tensor({2, 3, 9}, at::kFloat, 2);
  const auto slot = attach_slot(weight, at::kFloat);
  const auto indices = some_indices();
  const auto y = nn::embedding(weight, indices);
  OperatorTrace trace;
  y.backward(grad);
  EXPECT_EQ(trace.count_movements(), 0);
  EXPECT_EQ(trace.count("aten::empty") + trace.count("aten::zeros"), 0);
  EXPECT_EQ(trace.count("hypershard::embedding_add_"), 1);
  EXPECT_EQ(slot->claims, 1);
}

TEST(EmbeddingTest, WorksInsideRecompute) {
  const auto weight = random_tensor({5, 9}, at::kFloat, 1).requires_grad_(true);
  const auto plain = random_tensor({5, 9}, at::kFloat, 1).requires_grad_(true);
  const auto slot = attach_slot(weight, at::kFloat);
  nn::embedding(plain, some_indices()).square().sum().backward();
  recompute(
      [&](const at::Tensor& indices) { return nn::embedding(weight, indices).square(); },
      some_indices()
  )
      .sum()
      .backward();
  EXPECT_TRUE(same_bits(slot->buffer, plain.grad()));
}

TEST(EmbeddingTest, AnIndexOutsideTheTableIsNamedWithItsPlace) {
  const auto weight = at::ones({5, 2});
  HS_EXPECT_THROWN(
      InvalidArgument,
      nn::embedding(weight, at::tensor({1, 5}, at::kLong)),
      "index 5 at position 1 of indices of shape [2]"
  );
  HS_EXPECT_THROWN(
      InvalidArgument, nn::embedding(weight, at::tensor({-1}, at::kLong)), "index -1 at position 0"
  );
  HS_EXPECT_THROWN(
      InvalidArgument, nn::embedding(weight, at::ones({2})), "dtype Float (expected Long)"
  );
}

TEST(EmbeddingTest, SecondDerivativesWorkWithoutSlot) {
  const auto weight = random_tensor({5, 3}, at::kDouble, 1).requires_grad_(true);
  const auto first = torch::autograd::grad(
      {nn::embedding(weight, some_indices()).pow(3).sum()},
      {weight},
      {},
      true,
      /*create_graph=*/true
  );
  first[0].sum().backward();
  const auto counts = at::tensor({1.0, 1.0, 1.0, 3.0, 0.0}, at::kDouble).unsqueeze(1);
  EXPECT_TRUE(near(weight.grad(), 6 * weight.detach() * counts, 1e-12));
}

TEST(EmbeddingTest, TheLayerRegistersItsTable) {
  Embedding layer(EmbeddingOptions{.rows = 5, .dim = 3, .dtype = at::kDouble});
  EXPECT_EQ(layer->weight.sizes(), at::IntArrayRef({5, 3}));
  EXPECT_EQ(layer->forward(some_indices()).sizes(), at::IntArrayRef({2, 3, 3}));
  EXPECT_TRUE(
      Embedding(EmbeddingOptions{.rows = 5, .dim = 3, .device = at::kMeta})->weight.is_meta()
  );
}

}  // namespace
}  // namespace hypershard::nn
