// The schedule's values are closed-form: every expected number here is computed by hand.
#include "hypershard/optim/schedule.h"

#include <cmath>
#include <limits>
#include <string>

#include <gtest/gtest.h>

#include "hypershard/core/error.h"

namespace hypershard::optim {
namespace {

std::string refusal(const LearningRate& rate, std::int64_t step) {
  try {
    (void)rate.at(step);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

TEST(LearningRateTest, WarmUpRisesInAStraightLineAndEndsAtThePeak) {
  const LearningRate rate{.peak = 2, .warmup_steps = 4, .total_steps = 100};
  EXPECT_EQ(rate.at(0), 0.5);
  EXPECT_EQ(rate.at(1), 1.0);
  EXPECT_EQ(rate.at(2), 1.5);
  EXPECT_EQ(rate.at(3), 2.0);
  EXPECT_EQ(rate.at(4), 2.0);
}

TEST(LearningRateTest, LinearDecayIsAStraightLineToTheMinimum) {
  const LearningRate rate{
      .peak = 1, .warmup_steps = 2, .total_steps = 10, .decay = Decay::kLinear, .min_ratio = 0.5
  };
  EXPECT_EQ(rate.at(2), 1.0);
  EXPECT_EQ(rate.at(6), 0.75);
  EXPECT_EQ(rate.at(8), 0.625);
  EXPECT_EQ(rate.at(10), 0.5);
  EXPECT_EQ(rate.at(1'000'000), 0.5);
}

TEST(LearningRateTest, CosineDecayPassesHalfWayInTheMiddle) {
  const LearningRate rate{.peak = 1, .warmup_steps = 0, .total_steps = 12, .min_ratio = 0.1};
  EXPECT_EQ(rate.at(0), 1.0);
  EXPECT_NEAR(rate.at(4), 0.1 + 0.9 * 0.75, 1e-15);  // cos 60 degrees is a half
  EXPECT_NEAR(rate.at(6), 0.55, 1e-15);
  EXPECT_NEAR(rate.at(8), 0.1 + 0.9 * 0.25, 1e-15);
  EXPECT_EQ(rate.at(12), 0.1);
}

TEST(LearningRateTest, NoDecayStaysAtThePeakWithoutAnEnd) {
  const LearningRate rate{.peak = 0.3, .warmup_steps = 1, .decay = Decay::kNone};
  EXPECT_EQ(rate.at(0), 0.3);
  EXPECT_EQ(rate.at(std::numeric_limits<std::int64_t>::max()), 0.3);
}

TEST(LearningRateTest, RunShorterThanItsWarmUpOnlyRises) {
  const LearningRate rate{.peak = 1, .warmup_steps = 8, .total_steps = 4, .min_ratio = 0.25};
  EXPECT_EQ(rate.at(3), 0.5);
  EXPECT_EQ(rate.at(7), 1.0);
  EXPECT_EQ(rate.at(8), 0.25);
}

TEST(LearningRateTest, NeverRisesAfterTheWarmUpAndStaysWithinItsBounds) {
  for (const Decay decay : {Decay::kLinear, Decay::kCosine}) {
    const LearningRate rate{
        .peak = 3e-4, .warmup_steps = 7, .total_steps = 1000, .decay = decay, .min_ratio = 0.1
    };
    for (std::int64_t step = 8; step < 1100; ++step) {
      ASSERT_LE(rate.at(step), rate.at(step - 1)) << to_text(decay) << " at " << step;
      ASSERT_GE(rate.at(step), rate.peak * rate.min_ratio * (1 - 1e-12))
          << to_text(decay) << " at " << step;
    }
  }
}

TEST(LearningRateTest, ValuesOutOfRangeAreRefusedByName) {
  EXPECT_NE(refusal({.peak = -1, .total_steps = 1}, 0).find("peak is -1"), std::string::npos);
  EXPECT_NE(refusal({.peak = std::nan(""), .total_steps = 1}, 0).find("peak"), std::string::npos);
  EXPECT_NE(refusal({.warmup_steps = -2, .total_steps = 1}, 0).find("warmup"), std::string::npos);
  EXPECT_NE(
      refusal({.total_steps = 0}, 0).find("a cosine decay needs at least 1"), std::string::npos
  );
  EXPECT_NE(
      refusal({.total_steps = 1, .min_ratio = 1.5}, 0).find("min_ratio is 1.5"), std::string::npos
  );
  EXPECT_NE(refusal({.total_steps = 1}, -1).find("counted from 0"), std::string::npos);
}

}  // namespace
}  // namespace hypershard::optim
