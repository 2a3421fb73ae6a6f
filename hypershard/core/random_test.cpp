// Why: weights and data order must be the same on every mesh, so the generator has known answers
// and slices of a fill equal the whole bit for bit.
#include "hypershard/core/random.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "hypershard/core/error.h"

namespace hypershard {
namespace {

using Words = std::array<std::uint32_t, 4>;

TEST(RandomTest, PhiloxGivesThePublishedAnswers) {
  EXPECT_EQ(
      philox4x32({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8})
  );
  constexpr std::uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(
      philox4x32({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
      (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd})
  );
  EXPECT_EQ(
      philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
      (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1})
  );
}

TEST(RandomTest, BitsComeFromTheBlockOfSeedStreamAndIndex) {
  const std::uint64_t seed = 0x299f31d0a4093822;
  const std::uint64_t stream = 0x0370734413198a2e;
  const std::uint64_t block = 0x05a308d3243f6a88;
  const Words words =
      philox4x32({0x243f6a88, 0x05a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0});
  EXPECT_EQ(bits_at(seed, stream, 2 * block), std::uint64_t{words[1]} << 32 | words[0]);
  EXPECT_EQ(bits_at(seed, stream, 2 * block + 1), std::uint64_t{words[3]} << 32 | words[2]);
}

TEST(RandomTest, SeedStreamAndIndexEachChangeTheBits) {
  const std::uint64_t bits = bits_at(1, 2, 3);
  for (int bit = 0; bit < 64; ++bit) {
    const std::uint64_t flip = std::uint64_t{1} << bit;
    EXPECT_NE(bits_at(1 ^ flip, 2, 3), bits) << "seed bit " << bit;
    EXPECT_NE(bits_at(1, 2 ^ flip, 3), bits) << "stream bit " << bit;
    EXPECT_NE(bits_at(1, 2, 3 ^ flip), bits) << "index bit " << bit;
  }
}

/// Checks that fills of [0, n) cut at `cut` equal the single-number function.
template <class T, class Fill, class At>
void expect_slices_equal_whole(const Fill& fill, const At& at) {
  constexpr std::size_t kSize = 41;
  for (const std::uint64_t begin : {std::uint64_t{0}, std::uint64_t{7}, std::uint64_t{1} << 40}) {
    for (const std::size_t cut : {std::size_t{0}, std::size_t{1}, std::size_t{16}, kSize}) {
      std::vector<T> values(kSize);
      fill(std::span<T>(values).first(cut), begin);
      fill(std::span<T>(values).subspan(cut), begin + cut);
      for (std::size_t i = 0; i < kSize; ++i) {
        const T expected = static_cast<T>(at(begin + i));
        ASSERT_EQ(values[i], expected) << "begin " << begin << " cut " << cut << " i " << i;
      }
    }
  }
}

template <class T>
class RandomFillTest : public testing::Test {};
using Floats = testing::Types<float, double>;
TYPED_TEST_SUITE(RandomFillTest, Floats);

TYPED_TEST(RandomFillTest, UniformSlicesEqualTheWhole) {
  expect_slices_equal_whole<TypeParam>(
      [](std::span<TypeParam> values, std::uint64_t begin) {
        fill_uniform(values, 5, 6, begin, -2.0, 3.0);
      },
      [](std::uint64_t index) { return -2.0 + 5.0 * uniform_at(5, 6, index); }
  );
}

TYPED_TEST(RandomFillTest, NormalSlicesEqualTheWhole) {
  expect_slices_equal_whole<TypeParam>(
      [](std::span<TypeParam> values, std::uint64_t begin) {
        fill_normal(values, 5, 6, begin, 0.25, 0.02);
      },
      [](std::uint64_t index) { return 0.25 + 0.02 * normal_at(5, 6, index); }
  );
}

TYPED_TEST(RandomFillTest, TruncNormalSlicesEqualTheWhole) {
  const TruncNormal normal{.mean = 0.5, .stddev = 2, .low = -1, .high = 4};
  expect_slices_equal_whole<TypeParam>(
      [&](std::span<TypeParam> values, std::uint64_t begin) {
        fill_trunc_normal(values, 5, 6, begin, normal);
      },
      [&](std::uint64_t index) { return trunc_normal_at(normal, 5, 6, index); }
  );
}

TYPED_TEST(RandomFillTest, UniformStaysBelowItsHighEnd) {
  // The only values of this type in the interval are its ends, so rounding would often reach
  // `high`.
  const TypeParam low = 1;
  const TypeParam high = std::nextafter(low, TypeParam{2});
  std::vector<TypeParam> values(1000);
  fill_uniform(std::span<TypeParam>(values), 1, 1, 0, low, high);
  EXPECT_EQ(std::count(values.begin(), values.end(), low), 1000);
}

struct Moments {
  double mean = 0;
  double variance = 0;
  double kurtosis = 0;
};

Moments moments_of(const std::vector<double>& values) {
  Moments moments;
  const auto n = static_cast<double>(values.size());
  for (const double value : values) {
    moments.mean += value / n;
  }
  for (const double value : values) {
    const double square = (value - moments.mean) * (value - moments.mean);
    moments.variance += square / n;
    moments.kurtosis += square * square / n;
  }
  moments.kurtosis /= moments.variance * moments.variance;
  return moments;
}

// Bounds below are five standard errors of the statistic over kDraws draws; seeds are fixed.
constexpr std::size_t kDraws = 200'000;

TEST(RandomTest, UniformHasItsMoments) {
  std::vector<double> values(kDraws);
  fill_uniform(std::span<double>(values), 3, 4, 0);
  const Moments moments = moments_of(values);
  EXPECT_NEAR(moments.mean, 0.5, 0.0033);
  EXPECT_NEAR(moments.variance, 1.0 / 12, 0.001);
  EXPECT_NEAR(moments.kurtosis, 1.8, 0.02);
}

TEST(RandomTest, NormalHasItsMomentsAndTails) {
  std::vector<double> values(kDraws);
  fill_normal(std::span<double>(values), 3, 4, 0);
  const Moments moments = moments_of(values);
  EXPECT_NEAR(moments.mean, 0.0, 0.0112);
  EXPECT_NEAR(moments.variance, 1.0, 0.016);
  EXPECT_NEAR(moments.kurtosis, 3.0, 0.055);
  const auto beyond =
      std::count_if(values.begin(), values.end(), [](double value) { return std::abs(value) > 3; });
  EXPECT_NEAR(static_cast<double>(beyond) / kDraws, 0.0027, 0.0006);
}

TEST(RandomTest, NeighbouringNormalsAreUncorrelated) {
  std::vector<double> values(kDraws);
  fill_normal(std::span<double>(values), 8, 9, 0);
  for (const std::size_t lag : {std::size_t{1}, std::size_t{2}}) {
    double sum = 0;
    for (std::size_t i = 0; i + lag < kDraws; ++i) {
      sum += values[i] * values[i + lag];
    }
    EXPECT_NEAR(sum / kDraws, 0.0, 0.0112) << "lag " << lag;
  }
}

TEST(RandomTest, TruncNormalInvertsTheDistributionFunction) {
  const TruncNormal wide{.mean = 0, .stddev = 1, .low = -8, .high = 8};
  const auto below = [](double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); };
  for (std::uint64_t index = 0; index < 20'000; ++index) {
    const double p = uniform_at(1, 2, index);
    const double x = trunc_normal_at(wide, 1, 2, index);
    ASSERT_NEAR(below(x), p, 4e-15) << "p " << p;
  }
}

TEST(RandomTest, TruncNormalKeepsItsCutsFarFromTheMean) {
  for (const double sign : {-1.0, 1.0}) {
    TruncNormal tail{.mean = 0, .stddev = 1, .low = 10, .high = 11};
    if (sign < 0) {
      tail = {.mean = 0, .stddev = 1, .low = -11, .high = -10};
    }
    std::vector<double> values(1000);
    fill_trunc_normal(std::span<double>(values), 1, 2, 0, tail);
    const auto [smallest, largest] = std::minmax_element(values.begin(), values.end());
    EXPECT_GE(*smallest, tail.low);
    EXPECT_LE(*largest, tail.high);
    // The mean beyond 10 is 10 + 1 / 10 - 2 / 10^3 + ... (Mills's ratio); the standard error is
    // 0.003.
    EXPECT_NEAR(sign * moments_of(values).mean, 10.098, 0.015);
  }
}

TEST(RandomTest, RejectsImpossibleDistributions) {
  std::vector<float> values(4);
  const std::span<float> span(values);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW(fill_uniform(span, 1, 1, 0, 2, 1), InvalidArgument);
  EXPECT_THROW(fill_uniform(span, 1, 1, 0, 0, nan), InvalidArgument);
  EXPECT_THROW(fill_normal(span, 1, 1, 0, 0, -1), InvalidArgument);
  EXPECT_THROW(fill_trunc_normal(span, 1, 1, 0, {.stddev = 0}), InvalidArgument);
  EXPECT_THROW(fill_trunc_normal(span, 1, 1, 0, {.low = 2, .high = 2}), InvalidArgument);
  EXPECT_THROW(fill_trunc_normal(span, 1, 1, 0, {.low = 50, .high = 51}), InvalidArgument);
  EXPECT_THROW(index_below(0, 1, 1, 1), InvalidArgument);
}

TEST(RandomTest, FillsOfNothingTouchNothing) {
  fill_normal(std::span<float>(), 1, 1, 3);
  fill_uniform(std::span<double>(), 1, 1, 3);
}

TEST(RandomTest, IndexBelowHitsEveryIntegerEquallyOften) {
  constexpr std::uint64_t kSides = 6;
  constexpr double kExpected = 10'000;
  std::array<int, kSides> counts{};
  for (std::uint64_t i = 0; i < kSides * 10'000; ++i) {
    ++counts.at(index_below(kSides, 1, 2, i));
  }
  double chi_square = 0;
  for (const int count : counts) {
    chi_square += (count - kExpected) * (count - kExpected) / kExpected;
  }
  EXPECT_LT(chi_square, 20.5);  // 5 degrees of freedom: p = 0.001
}

TEST(RandomTest, IndexBelowRejectsRatherThanFold) {
  // A quarter of all 64-bit words is rejected at this n; folding would make the result depend on
  // bits_at alone.
  const std::uint64_t n = (std::uint64_t{1} << 63) + (std::uint64_t{1} << 62);
  int num_redrawn = 0;
  constexpr int kNumTries = 4000;
  for (std::uint64_t i = 0; i < kNumTries; ++i) {
    const std::uint64_t value = index_below(n, 1, 2, i);
    ASSERT_LT(value, n);
    const double direct =
        std::ldexp(static_cast<double>(bits_at(1, 2, i)), -64) * static_cast<double>(n);
    num_redrawn += std::abs(static_cast<double>(value) - direct) > 1e6 ? 1 : 0;
  }
  EXPECT_NEAR(num_redrawn, kNumTries / 4, 140);
}

class PermutedIndexTest : public testing::TestWithParam<std::uint64_t> {};

TEST_P(PermutedIndexTest, MeetsEveryItemOnce) {
  const std::uint64_t n = GetParam();
  const PermutedIndex permuted(n, 11);
  EXPECT_EQ(permuted.size(), n);
  std::vector<bool> seen(n, false);
  for (std::uint64_t position = 0; position < n; ++position) {
    const std::uint64_t item = permuted(position);
    ASSERT_LT(item, n);
    ASSERT_FALSE(seen[item]) << item;
    seen[item] = true;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Sizes,
    PermutedIndexTest,
    testing::Values(1, 2, 3, 4, 5, 15, 16, 17, 255, 256, 257, 4095, 65'537)
);

TEST(PermutedIndexTest, EveryItemIsEquallyLikelyAtEveryPosition) {
  constexpr std::uint64_t kSize = 5;
  constexpr int kSeeds = 20'000;
  std::array<std::array<int, kSize>, kSize> counts{};
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    const PermutedIndex permuted(kSize, seed);
    for (std::uint64_t position = 0; position < kSize; ++position) {
      ++counts[position][permuted(position)];
    }
  }
  for (const auto& row : counts) {
    double chi_square = 0;
    for (const int count : row) {
      const double expected = static_cast<double>(kSeeds) / kSize;
      chi_square += (count - expected) * (count - expected) / expected;
    }
    EXPECT_LT(chi_square, 23.5);  // 4 degrees of freedom: p = 0.0001
  }
}

TEST(PermutedIndexTest, SeedsAndStreamsGiveOtherOrders) {
  constexpr std::uint64_t kSize = 1000;
  const PermutedIndex first(kSize, 1, 0);
  for (const PermutedIndex& other : {PermutedIndex(kSize, 2, 0), PermutedIndex(kSize, 1, 1)}) {
    int num_equal = 0;
    for (std::uint64_t position = 0; position < kSize; ++position) {
      num_equal += first(position) == other(position) ? 1 : 0;
    }
    EXPECT_LT(num_equal, 10);  // one is expected by chance
  }
}

TEST(PermutedIndexTest, ServesSizesBeyondAnyMemory) {
  const std::uint64_t n = (std::uint64_t{1} << 63) + 12345;
  const PermutedIndex permuted(n, 3);
  EXPECT_LT(permuted(0), n);
  EXPECT_LT(permuted(n - 1), n);
  EXPECT_NE(permuted(0), permuted(n - 1));
}

TEST(PermutedIndexTest, RejectsPositionsOutside) {
  EXPECT_THROW(PermutedIndex(0, 1), InvalidArgument);
  EXPECT_THROW(PermutedIndex(3, 1)(3), InvalidArgument);
}

}  // namespace
}  // namespace hypershard
