// Tests that the linear layer equals libtorch's with and without slots, and moves nothing it need
// not.
#include "hypershard/nn/linear.h"

#include <array>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/container/sequential.h>

#include "hypershard/core/error.h"
#include "hypershard/nn/internal/matmul.h"
#include "hypershard/nn/recompute.h"
#include "hypershard/nn/test_support.h"

namespace hypershard::nn {
namespace {

using testing::attach_slot;
using testing::near;
using testing::OperatorTrace;
using testing::random_tensor;
using testing::same_bits;

struct Fixture {
  explicit Fixture(at::ScalarType dtype, std::uint64_t seed = 1)
      : x(random_tensor({2, 5, 6}, dtype, seed).requires_grad_(true)),
        weight(random_tensor({4, 6}, dtype, seed + 1).requires_grad_(true)),
        bias(random_tensor({4}, dtype, seed + 2).requires_grad_(true)),
        grad(random_tensor({2, 5, 4}, dtype, seed + 3)) {}

  at::Tensor x, weight, bias, grad;
};

TEST(LinearTest, EqualsAtenWithoutSlotBitForBit) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    Fixture ours(dtype);
    Fixture theirs(dtype);
    const auto y = nn::linear(ours.x, ours.weight, ours.bias);
    const auto expected = at::linear(theirs.x, theirs.weight, theirs.bias);
    EXPECT_TRUE(same_bits(y, expected));
    y.backward(ours.grad);
    expected.backward(theirs.grad);
    EXPECT_TRUE(same_bits(ours.x.grad(), theirs.x.grad()));
    EXPECT_TRUE(same_bits(ours.weight.grad(), theirs.weight.grad()));
    EXPECT_TRUE(same_bits(ours.bias.grad(), theirs.bias.grad()));
  }
}

TEST(LinearTest, GradientsAgreeWithDifferences) {
  const auto x = random_tensor({3, 4}, at::kDouble, 1).requires_grad_(true);
  const auto weight = random_tensor({2, 4}, at::kDouble, 2).requires_grad_(true);
  const auto bias = random_tensor({2}, at::kDouble, 3).requires_grad_(true);
  testing::check_gradients(
      [](const auto& in) { return nn::linear(in[0], in[1], in[2]); }, {x, weight, bias}
  );
}

TEST(LinearTest, SlotGetsTheSameBitsAsThePlainPath) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    Fixture plain(dtype);
    Fixture fused(dtype);
    const auto weight_slot = attach_slot(fused.weight, dtype);
    const auto bias_slot = attach_slot(fused.bias, dtype);
    for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
      nn::linear(plain.x, plain.weight, plain.bias).backward(plain.grad);
      nn::linear(fused.x, fused.weight, fused.bias).backward(fused.grad);
      EXPECT_TRUE(near(weight_slot->buffer, plain.weight.grad(), dtype == at::kFloat ? 1e-6 : 1e-14)
      );
      EXPECT_TRUE(near(bias_slot->buffer, plain.bias.grad(), dtype == at::kFloat ? 1e-6 : 1e-14));
      if (micro_batch == 0) {
        EXPECT_TRUE(same_bits(weight_slot->buffer, plain.weight.grad()));
        EXPECT_TRUE(same_bits(bias_slot->buffer, plain.bias.grad()));
      }
      EXPECT_FALSE(fused.weight.grad().defined());
      EXPECT_FALSE(fused.bias.grad().defined());
    }
    EXPECT_TRUE(same_bits(fused.x.grad(), plain.x.grad()));
    EXPECT_EQ(weight_slot->claims, 3);
  }
}

// Large fp32 products take other kernels where those are faster, on one thread another still.
TEST(LinearTest, LargeProductsAreRightForAnySizeAndSlotOrNot) {
  const int threads = at::get_num_threads();
  for (const int num_threads : {1, 2}) {
    at::set_num_threads(num_threads);
    for (const auto& [rows, in, out] :
         {std::array<std::int64_t, 3>{128, 512, 512}, {131, 403, 349}, {1000, 129, 133}}) {
      const auto x = random_tensor({rows, in}, at::kFloat, 1).requires_grad_(true);
      const auto weight = random_tensor({out, in}, at::kFloat, 2).requires_grad_(true);
      const auto bias = random_tensor({out}, at::kFloat, 3);
      const auto grad = random_tensor({rows, out}, at::kFloat, 4);
      const auto wide = [](const at::Tensor& t) { return t.detach().to(at::kDouble); };
      const auto y = nn::linear(x, weight, bias);
      EXPECT_TRUE(at::allclose(wide(y), at::linear(wide(x), wide(weight), wide(bias)), 1e-5, 1e-4));
      y.backward(grad);
      EXPECT_TRUE(at::allclose(wide(x.grad()), wide(grad).mm(wide(weight)), 1e-5, 1e-4));
      EXPECT_TRUE(at::allclose(wide(weight.grad()), wide(grad).t().mm(wide(x)), 1e-5, 1e-4));

      const auto fused = weight.detach().clone().requires_grad_(true);
      const auto slot = attach_slot(fused, at::kFloat);
      nn::linear(x.detach(), fused, bias).backward(grad);
      EXPECT_TRUE(same_bits(slot->buffer, weight.grad()));
      nn::linear(x.detach(), fused, bias).backward(grad);
      EXPECT_TRUE(at::allclose(wide(slot->buffer), 2 * wide(weight.grad()), 1e-5, 1e-4));
    }
  }
  at::set_num_threads(threads);
}

TEST(LinearTest, ASlotWithoutDestinationMeansThePlainPath) {
  struct NoPlace : GradientSlot {
    Claim claim() override { return {}; }
  };
  Fixture f(at::kFloat);
  const auto slot = std::make_shared<NoPlace>();
  set_gradient_slot(f.weight, slot);
  nn::linear(f.x, f.weight).backward(f.grad);
  EXPECT_TRUE(f.weight.grad().defined());
}

TEST(LinearTest, Bf16ComputeFillsAnFp32Slot) {
  Fixture f(at::kBFloat16);
  const auto weight_slot = attach_slot(f.weight, at::kFloat);
  const auto bias_slot = attach_slot(f.bias, at::kFloat);
  const auto x = f.x.detach().to(at::kDouble).reshape({10, 6});
  const auto g = f.grad.to(at::kDouble).reshape({10, 4});
  const auto y = nn::linear(f.x, f.weight, f.bias);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(near(
      y.detach().reshape({10, 4}),
      at::linear(x, f.weight.detach().to(at::kDouble), f.bias.detach().to(at::kDouble)),
      1e-2
  ));
  y.backward(f.grad);
  const double tolerance = internal::multiplies_in_fp32(f.x) ? 1e-6 : 1e-2;
  EXPECT_TRUE(near(weight_slot->buffer, at::mm(g.t(), x), tolerance));
  EXPECT_TRUE(near(bias_slot->buffer, g.sum(0), 1e-6));
  nn::linear(f.x, f.weight, f.bias).backward(f.grad);
  EXPECT_TRUE(near(weight_slot->buffer, 2 * at::mm(g.t(), x), 2 * tolerance));
  EXPECT_TRUE(near(bias_slot->buffer, 2 * g.sum(0), 1e-6));
  EXPECT_EQ(f.x.grad().scalar_type(), at::kBFloat16);
  EXPECT_TRUE(
      near(f.x.grad().reshape({10, 6}), 2 * at::mm(g, f.weight.detach().to(at::kDouble)), 3e-2)
  );
}

TEST(LinearTest, Bf16SlotGetsTheRoundedGradient) {
  Fixture plain(at::kBFloat16);
  Fixture fused(at::kBFloat16);
  const auto slot = attach_slot(fused.weight, at::kBFloat16);
  nn::linear(plain.x, plain.weight).backward(plain.grad);
  nn::linear(fused.x, fused.weight).backward(fused.grad);
  EXPECT_TRUE(same_bits(slot->buffer, plain.weight.grad()));
}

TEST(LinearTest, AWeightUsedTwiceAddsUpInItsSlot) {
  Fixture plain(at::kDouble);
  Fixture fused(at::kDouble);
  const auto slot = attach_slot(fused.weight, at::kDouble);
  const auto twice = [](Fixture& f) {
    (nn::linear(f.x, f.weight) + nn::linear(f.x * 2, f.weight)).backward(f.grad);
  };
  twice(plain);
  twice(fused);
  EXPECT_EQ(slot->claims, 2);
  EXPECT_TRUE(near(slot->buffer, plain.weight.grad(), 1e-13));
}

TEST(LinearTest, AccumulateGradStillRunsSoThatTheEngineKnows) {
  Fixture f(at::kFloat);
  const auto slot = attach_slot(f.weight, at::kFloat);
  const auto y = nn::linear(f.x, f.weight);
  int runs = 0;
  const auto node = torch::autograd::impl::grad_accumulator(f.weight);
  struct PostHook : torch::autograd::FunctionPostHook {
    explicit PostHook(int& counter) : counter_(counter) {}
    torch::autograd::variable_list
    operator()(const torch::autograd::variable_list& outputs, const torch::autograd::variable_list&)
        override {
      ++counter_;
      return outputs;
    }
    int& counter_;
  };
  node->add_post_hook(std::make_unique<PostHook>(runs));
  y.backward(f.grad);
  EXPECT_EQ(runs, 1);
  EXPECT_EQ(slot->claims, 1);
}

TEST(LinearTest, FrozenParametersClaimNothing) {
  Fixture f(at::kFloat);
  const auto slot = attach_slot(f.weight, at::kFloat);
  f.weight.set_requires_grad(false);
  nn::linear(f.x, f.weight, f.bias).backward(f.grad);
  EXPECT_EQ(slot->claims, 0);
  EXPECT_TRUE(f.x.grad().defined());
  EXPECT_TRUE(f.bias.grad().defined());
}

TEST(LinearTest, TheFusedPathMovesNothing) {
  Fixture f(at::kFloat);
  const auto slot = attach_slot(f.weight, at::kFloat);
  OperatorTrace trace;
  const auto y = nn::linear(f.x, f.weight);
  y.backward(f.grad);
  nn::linear(f.x, f.weight).backward(f.grad);
  EXPECT_EQ(trace.count_movements(), 0);
  EXPECT_EQ(
      trace.count("aten::zero_") + trace.count("aten::zeros") + trace.count("aten::fill_"), 0
  );
  EXPECT_EQ(trace.count("aten::addmm"), 1) << "the second gradient is added by the product itself";
  EXPECT_EQ(slot->claims, 2);
}

TEST(LinearTest, WorksInsideRecompute) {
  Fixture plain(at::kDouble);
  Fixture fused(at::kDouble);
  const auto slot = attach_slot(fused.weight, at::kDouble);
  at::tanh(nn::linear(plain.x, plain.weight)).backward(plain.grad);
  recompute([&](const at::Tensor& x) { return at::tanh(nn::linear(x, fused.weight)); }, fused.x)
      .backward(fused.grad);
  EXPECT_EQ(slot->claims, 1);
  EXPECT_TRUE(same_bits(slot->buffer, plain.weight.grad()));
  EXPECT_TRUE(same_bits(fused.x.grad(), plain.x.grad()));
}

TEST(LinearTest, SavedInputsAreVersionChecked) {
  Fixture f(at::kFloat);
  const auto x = f.x.detach().clone();
  const auto y = nn::linear(x, f.weight);
  x.add_(1);
  HS_EXPECT_THROWN(c10::Error, y.backward(f.grad), "modified by an inplace operation");
}

TEST(LinearTest, SecondDerivativesWorkWithoutSlotAndAreRefusedWithOne) {
  Fixture f(at::kDouble);
  const auto first = torch::autograd::grad(
      {nn::linear(f.x, f.weight).square().sum()}, {f.x}, {}, true, /*create_graph=*/true
  );
  first[0].sum().backward();
  Fixture reference(at::kDouble);
  torch::autograd::grad(
      {at::linear(reference.x, reference.weight).square().sum()}, {reference.x}, {}, true, true
  )[0]
      .sum()
      .backward();
  EXPECT_TRUE(near(f.weight.grad(), reference.weight.grad(), 1e-12));
  const auto slot = attach_slot(f.weight, at::kDouble);
  HS_EXPECT_THROWN(
      Unsupported,
      nn::linear(f.x, f.weight).sum().backward({}, true, /*create_graph=*/true),
      "create_graph=true"
  );
}

TEST(LinearTest, TakesAnyStridesAndNumberOfDimensions) {
  const auto weight = random_tensor({4, 6}, at::kDouble, 2).requires_grad_(true);
  for (const auto& x :
       {random_tensor({6}, at::kDouble, 1),
        random_tensor({6, 3}, at::kDouble, 1).t(),
        random_tensor({2, 6, 3}, at::kDouble, 1).transpose(1, 2),
        at::empty({0, 6}, at::kDouble)}) {
    const auto reference = weight.detach().clone().requires_grad_(true);
    weight.mutable_grad() = at::Tensor();
    const auto y = nn::linear(x, weight);
    const auto expected = at::linear(x, reference);
    EXPECT_TRUE(near(y, expected, 1e-13));
    y.sum().backward();
    expected.sum().backward();
    EXPECT_TRUE(near(weight.grad(), reference.grad(), 1e-13));
  }
}

// What a rank of several may have of a layer: none of its columns, or none of its rows.
TEST(LinearTest, EmptyLayersHaveEmptyGradients) {
  for (const auto& [in, out] : {std::pair<int, int>{0, 4}, {4, 0}, {0, 0}}) {
    const auto make = [in = in, out = out] {
      return std::vector<at::Tensor>{
          at::ones({2, 3, in}, at::kDouble).requires_grad_(),
          at::ones({out, in}, at::kDouble).requires_grad_(),
          at::ones({out}, at::kDouble).requires_grad_()
      };
    };
    const auto ours = make();
    const auto theirs = make();
    const auto y = nn::linear(ours[0], ours[1], ours[2]);
    const auto expected = at::linear(theirs[0], theirs[1], theirs[2]);
    EXPECT_TRUE(same_bits(y, expected));
    y.sum().backward();
    expected.sum().backward();
    for (std::size_t i = 0; i < ours.size(); ++i) {
      EXPECT_TRUE(same_bits(ours[i].grad(), theirs[i].grad())) << in << " " << out << " " << i;
    }
  }
}

TEST(LinearTest, ShapesThatDoNotFitAreNamed) {
  HS_EXPECT_THROWN(
      InvalidArgument,
      nn::linear(at::ones({2, 5}), at::ones({4, 6})),
      "shape [2, 5] does not fit weight of shape [4, 6]"
  );
  HS_EXPECT_THROWN(InvalidArgument, Linear(0, 3), "in 0, out 3");
}

TEST(LinearTest, TheLayerRegistersItsParametersAndStandsInSequential) {
  Linear layer(LinearOptions{.in = 6, .out = 4, .bias = true, .dtype = at::kDouble});
  EXPECT_EQ(layer->named_parameters().keys(), std::vector<std::string>({"weight", "bias"}));
  EXPECT_EQ(layer->weight.sizes(), at::IntArrayRef({4, 6}));
  EXPECT_EQ(layer->weight.scalar_type(), at::kDouble);
  EXPECT_LE(layer->weight.abs().max().item<double>(), 1 / std::sqrt(6.0));
  EXPECT_GT(layer->weight.abs().max().item<double>(), 0);
  torch::nn::Sequential model(
      layer, Linear(LinearOptions{.in = 4, .out = 2, .dtype = at::kDouble})
  );
  EXPECT_EQ(model->forward(at::ones({3, 6}, at::kDouble)).sizes(), at::IntArrayRef({3, 2}));
  EXPECT_TRUE(Linear(LinearOptions{.in = 6, .out = 4, .device = at::kMeta})->weight.is_meta());
}

}  // namespace
}  // namespace hypershard::nn
