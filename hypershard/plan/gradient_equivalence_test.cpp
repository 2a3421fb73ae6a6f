// The table of gradients: order, bounds, verdict.
#include "hypershard/plan/gradient_equivalence.h"

#include <limits>

#include <gtest/gtest.h>

#include "hypershard/plan/test_ranks.h"

namespace hypershard::plan {
namespace {

using layout::Layout;
using layout::Placement;

at::Tensor ramp(double factor, at::ScalarType dtype = at::kDouble) {
  return at::arange(1, 9, at::kDouble).mul(factor).to(dtype);
}

TEST(GradientEquivalenceTest, WorstComesFirstWithErrorAndCosine) {
  const NamedGradients reference{{"a", ramp(1)}, {"b", ramp(1)}, {"c", ramp(1)}};
  const NamedGradients found{{"a", ramp(1)}, {"b", ramp(2)}, {"c", ramp(1 + 1e-12)}};
  const GradientReport report = compare_gradients(found, reference);
  EXPECT_FALSE(report.passed);
  ASSERT_EQ(report.rows.size(), 3U);
  EXPECT_EQ(report.rows[0].name, "b");
  EXPECT_NEAR(report.rows[0].relative_error, 1.0, 1e-12);
  EXPECT_NEAR(report.rows[0].cosine, 1.0, 1e-12);
  EXPECT_TRUE(report.rows[1].passed);
  EXPECT_EQ(report.rows[2].name, "a");
  const std::string text = to_text(report);
  HS_EXPECT_HAS(text, "b           1.000e+00   1.0000000   1.000e-10  FAILED");
  HS_EXPECT_HAS(text, "1 of 3 gradients differ");
}

TEST(GradientEquivalenceTest, BoundsFollowTheDtype) {
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    const double bound = gradient_bound(dtype);
    const NamedGradients reference{{"a", at::ones({1}, dtype).expand({64}).clone()}};
    const auto off = [&](double factor) {
      const at::Tensor values = at::ones({64}, at::kDouble) * (1 + factor * bound);
      return compare_gradients({{"a", values}}, reference).passed;
    };
    EXPECT_TRUE(off(0.5)) << dtype;
    EXPECT_FALSE(off(2)) << dtype;
  }
  EXPECT_THROW(gradient_bound(at::kLong), InvalidArgument);
}

TEST(GradientEquivalenceTest, MissingMisshapenAndInfiniteGradientsFailWithANote) {
  const NamedGradients reference{{"a", ramp(1)}, {"b", ramp(1)}, {"c", ramp(1)}};
  const NamedGradients found{
      {"b", ramp(1).view({2, 4})}, {"c", ramp(std::numeric_limits<double>::quiet_NaN())}
  };
  const std::string text = to_text(compare_gradients(found, reference));
  HS_EXPECT_HAS(text, "no gradient arrived");
  HS_EXPECT_HAS(text, "shape [2, 4] instead of [8]");
  HS_EXPECT_HAS(text, "not finite");
}

TEST(GradientEquivalenceTest, GradientsWithoutAReferenceFailUnlessTheyAreZero) {
  const NamedGradients reference{{"a", ramp(1)}};
  EXPECT_TRUE(compare_gradients({{"a", ramp(1)}, {"skipped", ramp(0)}}, reference).passed);
  const GradientReport report = compare_gradients({{"a", ramp(1)}, {"b", ramp(2)}}, reference);
  EXPECT_FALSE(report.passed);
  EXPECT_EQ(report.rows.front().name, "b");
  HS_EXPECT_HAS(to_text(report), "but none in the unsharded step");
  const GradientReport nothing = compare_gradients({}, {});
  EXPECT_FALSE(nothing.passed);
  HS_EXPECT_HAS(to_text(nothing), "no gradients to compare");
}

TEST(GradientEquivalenceTest, RoundingOfAGradientThatIsZeroCounts) {
  const NamedGradients reference{{"a", ramp(1)}, {"zero", ramp(0)}};
  EXPECT_TRUE(compare_gradients({{"a", ramp(1)}, {"zero", ramp(1e-16)}}, reference).passed);
  EXPECT_FALSE(compare_gradients({{"a", ramp(1)}, {"zero", ramp(1e-6)}}, reference).passed);
}

// One gradient whose addends cancel but for `rest` of them, summed as one rank does, as several do,
// and without rounding; beside it one that does not cancel.
struct Cancelling {
  explicit Cancelling(double rest) {
    const at::Tensor terms = at::arange(64 * 100, at::kDouble).mul(0.7).sin().view({64, 100});
    const at::Tensor kept = at::arange(100, at::kDouble).add(1).cos().mul(rest);
    addends = at::cat({terms, terms.neg(), kept.unsqueeze(0)}).to(at::kFloat);
    const at::Tensor exact = addends.to(at::kDouble).sum(0);
    const at::Tensor plain = kept.to(at::kFloat);
    reference.gradients = {{"cancels", exact}, {"plain", plain.to(at::kDouble)}};
    reference.rounded = {{"cancels", sum(0, 129)}, {"plain", plain}};
    found = {{"cancels", sum(0, 40) + (sum(40, 90) + sum(90, 129))}, {"plain", plain}};
  }
  at::Tensor sum(std::int64_t begin, std::int64_t end) const {
    at::Tensor total = at::zeros({100}, at::kFloat);
    for (std::int64_t i = begin; i < end; ++i) {
      total = total + addends[i];
    }
    return total;
  }
  bool equals_fp32() const { return compare_gradients(found, reference.rounded).passed; }

  at::Tensor addends;
  ExactReference reference;
  NamedGradients found;
};

TEST(ExactReferenceTest, RoundingOfTermsThatCancelIsNoDifference) {
  const Cancelling cancelling(2e-2);
  EXPECT_FALSE(cancelling.equals_fp32());
  const GradientReport report = compare_with_exact(cancelling.found, cancelling.reference);
  EXPECT_TRUE(report.passed) << to_text(report);
  EXPECT_TRUE(report.is_exact);
  ASSERT_EQ(report.rows.size(), 2U);
  EXPECT_EQ(report.rows[0].name, "cancels");
  EXPECT_GT(report.rows[0].relative_error, 1e-5);
  EXPECT_GT(report.rows[0].bound, 1e-5);
  EXPECT_EQ(report.rows[1].bound, 1e-5);
  const std::string text = to_text(report);
  HS_EXPECT_HAS(text, "fp32 rounds by ");
  HS_EXPECT_HAS(text, "all 2 gradients are equal, judged beside a reference in fp64");
}

TEST(ExactReferenceTest, WhatIsWrongStaysWrong) {
  const Cancelling cancelling(2e-2);
  const auto expect_refused = [&](const char* name, const at::Tensor& wrong) {
    NamedGradients found = cancelling.found;
    found[name] = wrong;
    const GradientReport report = compare_with_exact(found, cancelling.reference);
    EXPECT_FALSE(report.passed) << to_text(report);
    EXPECT_EQ(report.rows.front().name, name);
    HS_EXPECT_HAS(to_text(report), "1 of 2 gradients differ, judged beside a reference in fp64");
  };
  expect_refused("cancels", cancelling.found.at("cancels") * 1.001);
  expect_refused("cancels", cancelling.sum(0, 40));  // one rank's part, not reduced
  expect_refused("cancels", cancelling.sum(0, 128));
  expect_refused("cancels", at::Tensor());
  expect_refused("plain", cancelling.found.at("plain") * 1.001);
  expect_refused("plain", cancelling.found.at("plain") * (1 + 3e-5));
}

// However little fp32 leaves of a gradient.
TEST(ExactReferenceTest, BoundsEndBelowAThousandth) {
  const Cancelling cancelling(1e-4);
  NamedGradients found = cancelling.found;
  found["cancels"] = cancelling.reference.gradients.at("cancels") * 1.001;
  const GradientReport report = compare_with_exact(found, cancelling.reference);
  EXPECT_FALSE(report.passed) << to_text(report);
  EXPECT_LT(report.rows.front().bound, 1e-3);
}

// A reference that was added up without rounding shows none, but found gradients have it.
TEST(ExactReferenceTest, AddendsRoundWhereTheReferenceDoesNot) {
  Cancelling cancelling(2e-2);
  cancelling.reference.rounded["cancels"] =
      cancelling.reference.gradients.at("cancels").to(at::kFloat);
  EXPECT_FALSE(compare_with_exact(cancelling.found, cancelling.reference).passed);
  cancelling.reference.addends["cancels"] = cancelling.addends.norm(2, {1}).sum().item<double>();
  const GradientReport report = compare_with_exact(cancelling.found, cancelling.reference);
  EXPECT_TRUE(report.passed) << to_text(report);
}

TEST(ExactReferenceTest, ZeroGradientsAreMeasuredByTheTypicalOne) {
  ExactReference reference{{{"a", ramp(1)}, {"zero", ramp(0)}}, {}};
  reference.rounded = {{"a", ramp(1, at::kFloat)}, {"zero", ramp(1e-6, at::kFloat)}};
  EXPECT_TRUE(compare_with_exact({{"a", ramp(1)}, {"zero", ramp(-1e-7)}}, reference).passed);
  EXPECT_FALSE(compare_with_exact({{"a", ramp(1)}, {"zero", ramp(-1e-6)}}, reference).passed);
}

TEST(ExactReferenceTest, ReferencesOfTwoStepsAreRefused) {
  const NamedGradients exact{{"a", ramp(1)}};
  const auto text_of = [&](const NamedGradients& rounded) {
    return test::thrown_by([&] { compare_with_exact(exact, ExactReference{exact, rounded}); });
  };
  HS_EXPECT_HAS(text_of({}), "gradients of an exact reference in fp64 and in fp32");
  HS_EXPECT_HAS(
      text_of({{"b", ramp(1, at::kFloat)}}), "of 'a' of shape [8] in fp64, but in fp32 none"
  );
  HS_EXPECT_HAS(text_of({{"a", ramp(1)}}), "Double (expected both of one step)");
}

TEST(GradientEquivalenceTest, PlansAreComparedOverRanks) {
  testing::run_ranks(2, [](std::shared_ptr<comm::World> world) {
    const auto mesh = test::make_mesh(std::move(world), {{"tp", 2}});
    test::Net reference(8, 12);
    test::Net net(8, 12);
    const at::Tensor x = test::formula_tensor({4, 8}, 0.3);
    const auto forward = [&] { return std::vector<at::Tensor>{net->forward(x).pow(2).mean()}; };
    const auto applied = apply_plan(
        *net,
        test::tensor_parallel_plan(),
        mesh,
        {{x, {{4, 8}, Layout{{Placement::replicate()}}}, "x"}},
        forward
    );
    reference->forward(x).pow(2).mean().backward();
    forward().front().backward();
    const auto expected = named_gradients(*reference);
    const GradientReport report = gradient_equivalence(applied, expected);
    EXPECT_TRUE(report.passed) << to_text(report);
    EXPECT_EQ(report.rows.size(), 10U);
    EXPECT_FALSE(gradient_equivalence(applied, expected, 0.5).passed);
    auto without_head = expected;
    without_head.erase("head.weight");
    EXPECT_FALSE(gradient_equivalence(applied, without_head).passed);
  });
}

}  // namespace
}  // namespace hypershard::plan
