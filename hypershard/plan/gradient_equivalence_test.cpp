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
