// Layers whose parameter's rows several ranks share, against the same layers with whole parameters.
#include "hypershard/nn/row_part.h"

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd.h>

#include "hypershard/comm/communicator.h"
#include "hypershard/comm/world.h"
#include "hypershard/core/error.h"
#include "hypershard/dtensor/op_rules.h"
#include "hypershard/dtensor/redistribute.h"
#include "hypershard/layout/sharding.h"
#include "hypershard/nn/cross_entropy.h"
#include "hypershard/nn/embedding.h"
#include "hypershard/nn/linear.h"
#include "hypershard/nn/test_support.h"
#include "hypershard/testing/run_ranks.h"

namespace hypershard::nn {
namespace {

using hypershard::testing::run_ranks;
using nn::testing::near;
using nn::testing::OperatorTrace;
using nn::testing::random_tensor;
using nn::testing::same_bits;

/// Balanced rows of `total` for one rank of a world.
RowPartPtr part_of(comm::World& world, std::int64_t total) {
  const layout::DeviceMesh mesh({{"tp", world.size()}}, world.topology());
  const layout::TensorSpec spec{{total}, {{layout::Placement::shard(0)}}};
  return c10::make_intrusive<RowPart>(
      layout::local_offset(spec, mesh, world.rank())[0],
      layout::local_shape(spec, mesh, world.rank())[0],
      total,
      std::vector<int>{0},
      world.world_communicator()
  );
}

at::Tensor columns_of(const at::Tensor& whole, const RowPart& part) {
  return whole.detach().narrow(-1, part.first, part.count).clone();
}

struct Case {
  int ranks;
  std::int64_t classes;
  at::ScalarType dtype;
};

class CrossEntropyPartTest : public ::testing::TestWithParam<Case> {};

TEST_P(CrossEntropyPartTest, LossAndGradientEqualTheWholes) {
  const Case& param = GetParam();
  run_ranks(param.ranks, [&](const std::shared_ptr<comm::World>& world) {
    const auto part = part_of(*world, param.classes);
    const auto whole =
        (random_tensor({2, 4, param.classes}, at::kDouble, 1) * 5).to(param.dtype).requires_grad_();
    auto targets = at::arange(8, at::kLong).mul(3).remainder(param.classes).view({2, 4});
    targets[1][2] = -100;
    const auto logits = columns_of(whole, *part).requires_grad_();
    const auto expected = cross_entropy(whole, targets);
    const auto before = part->ranks->log().size();
    const auto loss = cross_entropy(logits, targets, part);
    const double tolerance = param.dtype == at::kDouble ? 1e-14 : 1e-6;
    EXPECT_TRUE(near(loss, expected, tolerance));
    EXPECT_EQ(loss.scalar_type(), expected.scalar_type());
    (expected * 3).backward();
    (loss * 3).backward();
    // One exchange of two numbers a row, none in backward, however many classes there are.
    const std::int64_t bytes =
        2 * 8 * world->size() * static_cast<std::int64_t>(loss.element_size());
    const auto entries = part->ranks->log().entries();
    EXPECT_EQ(entries.size(), before + (world->size() > 1 ? 1 : 0));
    if (world->size() > 1) {
      EXPECT_EQ(entries.back().payload_bytes, bytes);
    }
    const double rounding = param.dtype == at::kBFloat16 || param.dtype == at::kHalf ? 1e-2 : 1e-6;
    EXPECT_TRUE(near(
        logits.grad(),
        columns_of(whole.grad(), *part),
        param.dtype == at::kDouble ? 1e-14 : rounding
    ));
  });
}

INSTANTIATE_TEST_SUITE_P(
    Ranks,
    CrossEntropyPartTest,
    ::testing::Values(
        Case{1, 12, at::kDouble},
        Case{2, 12, at::kDouble},
        Case{2, 37, at::kFloat},
        Case{2, 37, at::kBFloat16},
        Case{2, 37, at::kHalf},
        Case{3, 37, at::kDouble},
        Case{4, 3, at::kDouble},
        Case{4, 3, at::kHalf},
        Case{4, 258, at::kFloat}
    ),
    [](const auto& each) {
      return std::to_string(each.param.ranks) + "_ranks_" + std::to_string(each.param.classes) +
             "_classes_" + c10::toString(each.param.dtype);
    }
);

TEST(CrossEntropyPartValuesTest, LargeLogitsStayFiniteAndNansShow) {
  run_ranks(2, [](const std::shared_ptr<comm::World>& world) {
    const auto part = part_of(*world, 4);
    const auto whole = at::tensor({1e30F, 0.0F, -1e30F, 5.0F}).view({1, 4});
    const auto targets = at::tensor({0}, at::kLong);
    EXPECT_EQ(cross_entropy(columns_of(whole, *part), targets, part).item<double>(), 0);
    const auto with_nan = at::tensor({1.0F, std::nanf(""), 2.0F, 3.0F}).view({1, 4});
    EXPECT_TRUE(std::isnan(cross_entropy(columns_of(with_nan, *part), targets, part).item<double>())
    );
    const auto none = at::tensor({-1}, at::kLong);
    EXPECT_TRUE(std::isnan(cross_entropy(columns_of(whole, *part), none, part).item<double>()));
  });
}

TEST(CrossEntropyPartValuesTest, Bf16LogitsAreNotCopied) {
  run_ranks(2, [](const std::shared_ptr<comm::World>& world) {
    const auto part = part_of(*world, 64);
    const auto logits =
        columns_of(random_tensor({4, 64}, at::kBFloat16, 1), *part).requires_grad_();
    const auto targets = at::tensor({0, 1, 40, 63}, at::kLong);
    OperatorTrace trace;
    cross_entropy(logits, targets, part).backward();
    EXPECT_EQ(trace.count_movements(), 0);
    EXPECT_EQ(trace.count("hypershard::cross_entropy_part_forward"), 1);
  });
}

TEST(CrossEntropyPartValuesTest, WrongShapesAndTargetsAreNamed) {
  run_ranks(2, [](const std::shared_ptr<comm::World>& world) {
    const auto part = part_of(*world, 6);
    const auto targets = at::tensor({0, 6}, at::kLong);
    HS_EXPECT_THROWN(
        InvalidArgument,
        cross_entropy(at::zeros({2, 3}), targets, part),
        "the target of row 1 is 6 (expected below the number of classes, 6)"
    );
    HS_EXPECT_THROWN(
        InvalidArgument,
        cross_entropy(at::zeros({2, 4}), targets, part),
        "come from a projection of which this rank has 3 of 6 rows"
    );
    // Logits that a boundary gathered are whole again.
    const auto right = at::tensor({0, 5}, at::kLong);
    EXPECT_TRUE(near(
        cross_entropy(at::zeros({2, 6}), right, part), cross_entropy(at::zeros({2, 6}), right), 0
    ));
    const auto logits = at::zeros({2, 3}).requires_grad_();
    const auto loss = cross_entropy(logits, right, part);
    HS_EXPECT_THROWN(
        Unsupported,
        torch::autograd::grad({loss}, {logits}, {}, std::nullopt, /*create_graph=*/true),
        "create_graph=true of logits whose classes are cut"
    );
  });
}

TEST(RowPartTest, EmbeddingsOfPartsSumToTheWholes) {
  for (const auto dtype : {at::kDouble, at::kHalf}) {
    run_ranks(3, [&](const std::shared_ptr<comm::World>& world) {
      const auto part = part_of(*world, 7);
      const auto whole = random_tensor({7, 5}, dtype, 1).requires_grad_();
      const auto weight =
          whole.detach().narrow(0, part->first, part->count).clone().requires_grad_();
      set_row_part(weight, part);
      const auto indices = at::tensor({3, 0, 3, 6, 2, 3}, at::kLong).view({2, 3});
      const auto grad = random_tensor({2, 3, 5}, dtype, 2);
      const auto y = nn::embedding(weight, indices);
      y.backward(grad);
      const auto expected = nn::embedding(whole, indices);
      expected.backward(grad);
      const auto sum = y.detach().clone();
      part->ranks->all_reduce(sum)->wait();
      EXPECT_TRUE(same_bits(sum, expected));
      EXPECT_TRUE(same_bits(weight.grad(), whole.grad().narrow(0, part->first, part->count)));
      HS_EXPECT_THROWN(
          InvalidArgument,
          nn::embedding(weight, at::tensor({7}, at::kLong)),
          "lies outside the table (expected 0 to 6)"
      );
    });
  }
}

TEST(RowPartTest, EmbeddingGradientsOfAPartAgreeWithDifferences) {
  const auto part = c10::make_intrusive<RowPart>(2, 3, 9, std::vector<int>{0}, nullptr);
  const auto weight = random_tensor({3, 2}, at::kDouble, 1).requires_grad_();
  set_row_part(weight, part);
  const auto indices = at::tensor({3, 0, 4, 8, 3}, at::kLong);
  nn::testing::check_gradients(
      [&](const auto& in) { return nn::embedding(in[0], indices); }, {weight}
  );
  // Another derivative of the gradient: it is linear in what comes in.
  const auto y = nn::embedding(weight, indices);
  const auto g = random_tensor({5, 2}, at::kDouble, 3).requires_grad_();
  const auto first = torch::autograd::grad({y}, {weight}, {g}, std::nullopt, true)[0];
  first.square().sum().backward();
  EXPECT_TRUE(near(g.grad()[0], 2 * (g[0] + g[4]), 1e-12)) << "row 3 is used twice";
  EXPECT_EQ(g.grad()[1].abs().sum().item<double>(), 0) << "row 0 is another rank's";
}

TEST(RowPartTest, AreFoundByTheParameterAndForgottenWithTheirOwner) {
  const auto weight = at::zeros({3, 2});
  EXPECT_EQ(row_part_of(weight), nullptr);
  auto part = c10::make_intrusive<RowPart>(2, 3, 9, std::vector<int>{0}, nullptr);
  set_row_part(weight, part);
  const at::Tensor handle = weight;  // NOLINT(performance-unnecessary-copy-initialization)
  EXPECT_EQ(row_part_of(handle), part);
  EXPECT_EQ(row_part_of(weight.clone()), nullptr);
  const auto wrong = at::zeros({4, 2});
  set_row_part(wrong, part);
  HS_EXPECT_THROWN(InvalidArgument, row_part_of(wrong), "is said to be rows 2 to 5 of 9");
  set_row_part(wrong, nullptr);
  EXPECT_EQ(row_part_of(wrong), nullptr);
  part.reset();
  EXPECT_EQ(row_part_of(weight), nullptr);
  HS_EXPECT_THROWN(InvalidArgument, set_row_part(at::Tensor(), nullptr), "undefined tensor");
}

TEST(RowPartTest, ColumnsAreGatheredInTheOrderOfTheRows) {
  run_ranks(4, [](const std::shared_ptr<comm::World>& world) {
    for (const std::int64_t total : {3, 10}) {
      const auto part = part_of(*world, total);
      const auto whole = random_tensor({2, 3, total}, at::kFloat, 1);
      EXPECT_TRUE(same_bits(gather_columns(columns_of(whole, *part), *part), whole));
    }
  });
}

/// Logits [rows, classes] and targets [rows] on two axes, and the axes that cut the projection.
struct CutLogits {
  layout::Placement first;
  layout::Placement second;
  std::vector<int> axes;
};

TEST(CrossEntropyPartRuleTest, ResultsLieAsTheRuleSays) {
  using layout::Layout;
  using layout::Placement;
  constexpr std::int64_t kRows = 8;
  constexpr std::int64_t kClasses = 7;
  const Placement whole = Placement::replicate();
  const Placement rows = Placement::shard(0);
  const Placement classes = Placement::shard(1);
  const std::vector<CutLogits> cases = {
      {whole, classes, {1}},
      {classes, whole, {0}},
      {rows, classes, {1}},
      {classes, rows, {0}},
      {classes, classes, {0, 1}},
      {rows, whole, {}},
      {rows, rows, {}}
  };
  const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("hypershard::cross_entropy_part_forward", "");
  const auto all_logits = random_tensor({kRows, kClasses}, at::kDouble, 1);
  const auto all_targets = at::arange(kRows, at::kLong).mul(3).remainder(kClasses);
  run_ranks(4, [&](const std::shared_ptr<comm::World>& world) {
    const auto mesh = std::make_shared<const comm::ProcessMesh>(
        world, layout::DeviceMesh({{"a", 2}, {"b", 2}}, world->topology())
    );
    const std::vector<std::string> names = {"a", "b"};
    for (const CutLogits& cut : cases) {
      const layout::TensorSpec logits{{kRows, kClasses}, {{cut.first, cut.second}}};
      layout::TensorSpec targets{{kRows}, {{cut.first, cut.second}}};
      for (Placement& placement : targets.layout.placements) {
        placement = placement == classes ? whole : placement;
      }
      const auto begin = layout::local_offset(logits, mesh->mesh(), world->rank());
      const auto size = layout::local_shape(logits, mesh->mesh(), world->rank());
      std::vector<std::string> cut_by;
      for (const int axis : cut.axes) {
        cut_by.push_back(names[static_cast<std::size_t>(axis)]);
      }
      const auto part = c10::make_intrusive<RowPart>(
          begin[1], size[1], kClasses, cut.axes, cut_by.empty() ? nullptr : mesh->axes(cut_by)
      );
      std::vector<c10::IValue> stack = {
          all_logits.narrow(0, begin[0], size[0]).narrow(1, begin[1], size[1]).clone(),
          all_targets.narrow(0, begin[0], size[0]).clone(),
          part
      };
      const std::vector<layout::TensorSpec> specs = {logits, targets};
      const auto verdict = dtensor::propagate({op, stack, specs}, mesh->mesh());
      ASSERT_FALSE(verdict.refusal.has_value()) << verdict.refusal->what;
      op.callBoxed(&stack);
      const Layout everywhere = layout::replicated_layout(mesh->mesh());
      const auto whole_of = [&](std::size_t i) {
        return dtensor::redistribute(stack[i].toTensor(), verdict.outputs[i], everywhere, mesh);
      };
      const auto text = to_text(logits.layout, mesh->mesh());
      EXPECT_TRUE(near(whole_of(0), cross_entropy(all_logits, all_targets), 1e-14)) << text;
      EXPECT_TRUE(near(whole_of(1), at::logsumexp(all_logits, {1}), 1e-14)) << text;
    }
  });
}

}  // namespace
}  // namespace hypershard::nn
