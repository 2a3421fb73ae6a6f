// Tests the fused attention against its formula, ATen's and differences.
#include "hypershard/nn/attention.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "hypershard/core/error.h"
#include "hypershard/nn/test_support.h"

namespace hypershard::nn {
namespace {

using testing::near;
using testing::OperatorTrace;
using testing::random_tensor;
using testing::same_bits;

// The formula in plain operators, fp64.
at::Tensor attention_by_formula(
    const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in
) {
  const auto group = q_in.size(2) / k_in.size(2);
  const auto q = q_in.to(at::kDouble).transpose(1, 2);
  const auto k = k_in.to(at::kDouble).repeat_interleave(group, 2).transpose(1, 2);
  const auto v = v_in.to(at::kDouble).repeat_interleave(group, 2).transpose(1, 2);
  const auto scores = at::matmul(q, k.transpose(2, 3)) / std::sqrt(static_cast<double>(q.size(3)));
  const auto later = at::ones({q.size(2), q.size(2)}, at::kBool).triu(1);
  const auto p =
      at::softmax(scores.masked_fill(later, -std::numeric_limits<double>::infinity()), -1);
  return at::matmul(p, v).transpose(1, 2);
}

struct Case {
  std::int64_t batch, positions, heads, kv_heads, head_dim;
};

class AttentionTest : public ::testing::TestWithParam<Case> {};

TEST_P(AttentionTest, ValuesAndGradientsFollowTheFormula) {
  const auto [batch, positions, heads, kv_heads, head_dim] = GetParam();
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const double tolerance = dtype == at::kDouble ? 1e-12 : dtype == at::kFloat ? 1e-5 : 3e-2;
    const auto q =
        random_tensor({batch, positions, heads, head_dim}, dtype, 1).requires_grad_(true);
    const auto k =
        random_tensor({batch, positions, kv_heads, head_dim}, dtype, 2).requires_grad_(true);
    const auto v =
        random_tensor({batch, positions, kv_heads, head_dim}, dtype, 3).requires_grad_(true);
    const auto grad = random_tensor({batch, positions, heads, head_dim}, dtype, 4);
    const auto wide_q = q.detach().to(at::kDouble).requires_grad_(true);
    const auto wide_k = k.detach().to(at::kDouble).requires_grad_(true);
    const auto wide_v = v.detach().to(at::kDouble).requires_grad_(true);
    const auto out = causal_attention(q, k, v);
    const auto expected = attention_by_formula(wide_q, wide_k, wide_v);
    EXPECT_EQ(out.scalar_type(), dtype);
    EXPECT_TRUE(out.is_contiguous());
    EXPECT_TRUE(near(out, expected, tolerance)) << dtype;
    out.backward(grad);
    expected.backward(grad.to(at::kDouble));
    EXPECT_TRUE(near(q.grad(), wide_q.grad(), tolerance)) << dtype;
    EXPECT_TRUE(near(k.grad(), wide_k.grad(), 2 * tolerance)) << dtype;
    EXPECT_TRUE(near(v.grad(), wide_v.grad(), 2 * tolerance)) << dtype;
  }
}

// Tiles of 32 queries, packs of 8 keys, products in steps of 1 to 3 packs: sizes on both sides of
// each.
INSTANTIATE_TEST_SUITE_P(
    Sizes,
    AttentionTest,
    ::testing::Values(
        Case{1, 1, 1, 1, 8},
        Case{2, 5, 2, 1, 16},
        Case{1, 31, 2, 2, 24},
        Case{1, 33, 3, 1, 32},
        Case{2, 64, 4, 2, 40},
        Case{1, 71, 2, 2, 64},
        Case{1, 40, 2, 2, 6}  // head_dim does not fit the kernel
    ),
    [](const auto& made) {
      return "Positions" + std::to_string(made.param.positions) + "Dim" +
             std::to_string(made.param.head_dim);
    }
);

TEST(AttentionKernelTest, GradientsAgreeWithDifferences) {
  const auto q = random_tensor({1, 6, 2, 4}, at::kDouble, 1).requires_grad_(true);
  const auto k = random_tensor({1, 6, 1, 4}, at::kDouble, 2).requires_grad_(true);
  const auto v = random_tensor({1, 6, 1, 4}, at::kDouble, 3).requires_grad_(true);
  OperatorTrace trace;
  testing::check_gradients(
      [](const auto& in) { return causal_attention(in[0], in[1], in[2]); }, {q, k, v}, 1e-6
  );
  EXPECT_GT(trace.count("hypershard::attention_backward"), 0);
}

TEST(AttentionKernelTest, ReadsStridedHeadsWithoutACopy) {
  const auto packed = random_tensor({2, 20, 3, 2, 16}, at::kFloat, 1);  // q, k, v side by side
  const auto q = packed.select(2, 0);
  const auto k = packed.select(2, 1);
  const auto v = packed.select(2, 2);
  OperatorTrace trace;
  const auto out = causal_attention(q, k, v);
  EXPECT_EQ(trace.count_movements(), 0);
  EXPECT_TRUE(same_bits(out, causal_attention(q.contiguous(), k.contiguous(), v.contiguous())));
  EXPECT_TRUE(near(out, attention_by_formula(q, k, v), 1e-5));
}

TEST(AttentionKernelTest, LargeScoresStayFiniteAndLaterPositionsAreNotRead) {
  auto q = random_tensor({1, 40, 1, 16}, at::kFloat, 1) * 100;
  auto k = random_tensor({1, 40, 1, 16}, at::kFloat, 2) * 100;
  auto v = random_tensor({1, 40, 1, 16}, at::kFloat, 3);
  const auto before = causal_attention(q, k, v);
  EXPECT_TRUE(before.isfinite().all().item<bool>());
  k.narrow(1, 39, 1).fill_(1e4);
  v.narrow(1, 39, 1).fill_(1e4);
  EXPECT_TRUE(same_bits(causal_attention(q, k, v).narrow(1, 0, 39), before.narrow(1, 0, 39)));
}

TEST(AttentionKernelTest, ANanShows) {
  auto q = random_tensor({1, 10, 1, 16}, at::kFloat, 1);
  q[0][4][0][3] = std::nan("");
  const auto out = causal_attention(
      q, random_tensor({1, 10, 1, 16}, at::kFloat, 2), random_tensor({1, 10, 1, 16}, at::kFloat, 3)
  );
  EXPECT_TRUE(out[0][4].isnan().all().item<bool>());
  EXPECT_FALSE(out[0][3].isnan().any().item<bool>());
}

TEST(AttentionKernelTest, ThreadsChangeNothing) {
  const auto q = random_tensor({4, 48, 4, 16}, at::kFloat, 1).requires_grad_(true);
  const auto k = random_tensor({4, 48, 2, 16}, at::kFloat, 2).requires_grad_(true);
  const auto v = random_tensor({4, 48, 2, 16}, at::kFloat, 3);
  const auto run = [&](int threads) {
    const int before = at::get_num_threads();
    at::set_num_threads(threads);
    q.mutable_grad() = at::Tensor();
    k.mutable_grad() = at::Tensor();
    causal_attention(q, k, v).square().sum().backward();
    at::set_num_threads(before);
    return std::pair(q.grad(), k.grad());
  };
  const auto one = run(1);
  const auto three = run(3);
  EXPECT_TRUE(same_bits(one.first, three.first));
  EXPECT_TRUE(same_bits(one.second, three.second));
}

TEST(AttentionKernelTest, WorksOnMetaAndEmptyBatches) {
  const auto meta = causal_attention(
      at::empty({2, 3, 4, 8}, at::kMeta),
      at::empty({2, 3, 2, 8}, at::kMeta),
      at::empty({2, 3, 2, 8}, at::kMeta)
  );
  EXPECT_EQ(meta.sizes(), at::IntArrayRef({2, 3, 4, 8}));
  EXPECT_EQ(
      causal_attention(at::empty({0, 3, 4, 8}), at::empty({0, 3, 2, 8}), at::empty({0, 3, 2, 8}))
          .numel(),
      0
  );
}

TEST(AttentionKernelTest, ShapesThatDoNotFitAndSecondDerivativesAreNamed) {
  const auto heads = [](std::int64_t n) { return at::ones({1, 3, n, 8}); };
  HS_EXPECT_THROWN(
      InvalidArgument,
      causal_attention(heads(3), heads(2), heads(2)),
      "q [1, 3, 3, 8], k [1, 3, 2, 8], v [1, 3, 2, 8]"
  );
  const auto q = heads(2).requires_grad_(true);
  HS_EXPECT_THROWN(
      Unsupported,
      causal_attention(q, heads(2), heads(2)).sum().backward({}, true, /*create_graph=*/true),
      "no second derivative"
  );
}

}  // namespace
}  // namespace hypershard::nn
