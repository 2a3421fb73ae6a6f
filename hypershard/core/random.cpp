// Why: the generator and the distributions of random.h. This file is compiled with
// -ffp-contract=off, so that one number and a bulk fill can never be rounded differently.
#include "hypershard/core/random.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>

#include "hypershard/core/error.h"

namespace hypershard {
namespace {

/// The two 64-bit words of a block; indices 2k and 2k+1 share block k.
struct Block {
  std::uint64_t word[2];
};

std::uint32_t low_half(std::uint64_t value) {
  return static_cast<std::uint32_t>(value);
}
std::uint32_t high_half(std::uint64_t value) {
  return static_cast<std::uint32_t>(value >> 32);
}

Block block_at(std::uint64_t seed, std::uint64_t stream, std::uint64_t number) {
  const auto out = philox4x32(
      {low_half(number), high_half(number), low_half(stream), high_half(stream)},
      {low_half(seed), high_half(seed)}
  );
  return {{std::uint64_t{out[1]} << 32 | out[0], std::uint64_t{out[3]} << 32 | out[2]}};
}

/// Maps 64 bits to [0, 1).
double to_unit(std::uint64_t bits) {
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

/// The numbers of a block's two indices.
struct Pair {
  double value[2];
};

/// Box-Muller. Never inlined, so that single numbers and fills run the same instructions.
[[gnu::noinline]] Pair normal_pair(const Block& block) {
  // 1 - u lies in (0, 1], which keeps the logarithm finite.
  const double radius = std::sqrt(-2.0 * std::log(1.0 - to_unit(block.word[0])));
  const double angle = 2.0 * std::numbers::pi * to_unit(block.word[1]);
  return {{radius * std::cos(angle), radius * std::sin(angle)}};
}

/// Distribution function of the standard normal; exact in the lower tail.
double normal_below(double x) {
  return 0.5 * std::erfc(-x / std::numbers::sqrt2);
}

template <std::size_t N>
double polynomial(const double (&coefficients)[N], double x) {
  double sum = 0;
  for (std::size_t i = N; i-- > 0;) {
    sum = sum * x + coefficients[i];
  }
  return sum;
}

/// Quantile of the standard normal, 0 < p < 1: AS 241, routine PPND16 (names of the paper).
double normal_quantile(double p) {
  static constexpr double kA[] = {
      3.3871328727963666080e0,
      1.3314166789178437745e+2,
      1.9715909503065514427e+3,
      1.3731693765509461125e+4,
      4.5921953931549871457e+4,
      6.7265770927008700853e+4,
      3.3430575583588128105e+4,
      2.5090809287301226727e+3
  };
  static constexpr double kB[] = {
      1.0,
      4.2313330701600911252e+1,
      6.8718700749205790830e+2,
      5.3941960214247511077e+3,
      2.1213794301586595867e+4,
      3.9307895800092710610e+4,
      2.8729085735721942674e+4,
      5.2264952788528545610e+3
  };
  static constexpr double kC[] = {
      1.42343711074968357734e0,
      4.63033784615654529590e0,
      5.76949722146069140550e0,
      3.64784832476320460504e0,
      1.27045825245236838258e0,
      2.41780725177450611770e-1,
      2.27238449892691845833e-2,
      7.74545014278341407640e-4
  };
  static constexpr double kD[] = {
      1.0,
      2.05319162663775882187e0,
      1.67638483018380384940e0,
      6.89767334985100004550e-1,
      1.48103976427480074590e-1,
      1.51986665636164571966e-2,
      5.47593808499534494600e-4,
      1.05075007164441684324e-9
  };
  static constexpr double kE[] = {
      6.65790464350110377720e0,
      5.46378491116411436990e0,
      1.78482653991729133580e0,
      2.96560571828504891230e-1,
      2.65321895265761230930e-2,
      1.24266094738807843860e-3,
      2.71155556874348757815e-5,
      2.01033439929228813265e-7
  };
  static constexpr double kF[] = {
      1.0,
      5.99832206555887937690e-1,
      1.36929880922735805310e-1,
      1.48753612908506148525e-2,
      7.86869131145613259100e-4,
      1.84631831751005468180e-5,
      1.42151175831644588870e-7,
      2.04426310338993978564e-15
  };
  const double q = p - 0.5;
  if (std::abs(q) <= 0.425) {
    const double r = 0.180625 - q * q;
    return q * polynomial(kA, r) / polynomial(kB, r);
  }
  const double r = std::sqrt(-std::log(q < 0 ? p : 1.0 - p));
  const double x = r <= 5 ? polynomial(kC, r - 1.6) / polynomial(kD, r - 1.6)
                          : polynomial(kE, r - 5.0) / polynomial(kF, r - 5.0);
  return q < 0 ? -x : x;
}

/// A cut normal with its distribution function at both ends, mirrored so that the nearer tail is
/// the lower one, where the distribution function is exact.
class CutNormal {
 public:
  explicit CutNormal(const TruncNormal& normal) : normal_(normal) {
    const bool is_finite = std::isfinite(normal.mean) && std::isfinite(normal.stddev) &&
                           std::isfinite(normal.low) && std::isfinite(normal.high);
    HS_CHECK(
        is_finite && normal.stddev > 0 && normal.low < normal.high,
        "random: impossible cut normal distribution: mean ",
        normal.mean,
        ", stddev ",
        normal.stddev,
        ", low ",
        normal.low,
        ", high ",
        normal.high,
        " (expected finite values, stddev > 0, low < high)"
    );
    const double low = (normal.low - normal.mean) / normal.stddev;
    const double high = (normal.high - normal.mean) / normal.stddev;
    sign_ = low + high > 0 ? -1.0 : 1.0;
    below_low_ = normal_below(sign_ > 0 ? low : -high);
    below_high_ = normal_below(sign_ > 0 ? high : -low);
    HS_CHECK_GT(
        below_high_,
        below_low_,
        "random: cut normal distribution: no double lies between low ",
        normal.low,
        " and high ",
        normal.high,
        " for mean ",
        normal.mean,
        " and stddev ",
        normal.stddev,
        HS_HINT("move the cut nearer to the mean")
    );
  }

  double at(double unit) const {
    const double p = below_low_ + (below_high_ - below_low_) * unit;
    // A p of 0 or 1 has no quantile; the clamp takes those to the ends, as it does rounding errors.
    const double x = p <= 0 ? -HUGE_VAL : p >= 1 ? HUGE_VAL : normal_quantile(p);
    return std::clamp(normal_.mean + normal_.stddev * sign_ * x, normal_.low, normal_.high);
  }

 private:
  TruncNormal normal_;
  double sign_ = 1;
  double below_low_ = 0;
  double below_high_ = 0;
};

/// Fills from pairs: `pair_of(block)` gives the numbers of the block's two indices, `round` makes a
/// T.
template <class T, class PairOf, class Round>
void fill_pairs(
    std::span<T> values,
    std::uint64_t seed,
    std::uint64_t stream,
    std::uint64_t begin_index,
    const PairOf& pair_of,
    const Round& round
) {
  const auto pair_with = [&](std::size_t i) {
    return pair_of(block_at(seed, stream, (begin_index + i) / 2));
  };
  std::size_t i = 0;
  if (begin_index % 2 == 1 && !values.empty()) {
    values[i++] = round(pair_with(0).value[1]);
  }
  for (; i + 1 < values.size(); i += 2) {
    const Pair pair = pair_with(i);
    values[i] = round(pair.value[0]);
    values[i + 1] = round(pair.value[1]);
  }
  if (i < values.size()) {
    values[i] = round(pair_with(i).value[0]);
  }
}

template <class T>
void fill_uniform_of(
    std::span<T> values,
    std::uint64_t seed,
    std::uint64_t stream,
    std::uint64_t begin_index,
    double low,
    double high
) {
  HS_CHECK(
      std::isfinite(low) && std::isfinite(high) && std::isfinite(high - low) && low <= high,
      "random: impossible uniform distribution from ",
      low,
      " to ",
      high,
      " (expected finite bounds, low <= high)"
  );
  const auto pair_of = [&](const Block& block) {
    return Pair{{
        low + (high - low) * to_unit(block.word[0]),
        low + (high - low) * to_unit(block.word[1]),
    }};
  };
  const T end = static_cast<T>(high);
  const T last = low < high ? std::nextafter(end, static_cast<T>(low)) : end;
  fill_pairs(values, seed, stream, begin_index, pair_of, [&](double value) {
    const T rounded = static_cast<T>(value);
    return rounded < end ? rounded : last;  // rounding may reach the open end
  });
}

template <class T>
void fill_normal_of(
    std::span<T> values,
    std::uint64_t seed,
    std::uint64_t stream,
    std::uint64_t begin_index,
    double mean,
    double stddev
) {
  HS_CHECK(
      std::isfinite(mean) && std::isfinite(stddev) && stddev >= 0,
      "random: impossible normal distribution with mean ",
      mean,
      " and stddev ",
      stddev,
      " (expected finite values, stddev >= 0)"
  );
  fill_pairs(values, seed, stream, begin_index, normal_pair, [&](double value) {
    return static_cast<T>(mean + stddev * value);
  });
}

template <class T>
void fill_trunc_normal_of(
    std::span<T> values,
    std::uint64_t seed,
    std::uint64_t stream,
    std::uint64_t begin_index,
    const TruncNormal& normal
) {
  const CutNormal cut(normal);
  const auto pair_of = [&](const Block& block) {
    return Pair{{cut.at(to_unit(block.word[0])), cut.at(to_unit(block.word[1]))}};
  };
  fill_pairs(values, seed, stream, begin_index, pair_of, [](double value) {
    return static_cast<T>(value);
  });
}

/// Mixes 64 bits; the finalizer of Steele, Lea, Flood: "Fast splittable pseudorandom number
/// generators", OOPSLA 2014 (with Stafford's constants).
std::uint64_t mix64(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

}  // namespace

std::array<std::uint32_t, 4> philox4x32(
    std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key
) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product_0 = std::uint64_t{0xD2511F53} * counter[0];
    const std::uint64_t product_1 = std::uint64_t{0xCD9E8D57} * counter[2];
    counter = {
        high_half(product_1) ^ counter[1] ^ key[0],
        low_half(product_1),
        high_half(product_0) ^ counter[3] ^ key[1],
        low_half(product_0),
    };
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

std::uint64_t bits_at(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  return block_at(seed, stream, index / 2).word[index % 2];
}

double uniform_at(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  return to_unit(bits_at(seed, stream, index));
}

double normal_at(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  return normal_pair(block_at(seed, stream, index / 2)).value[index % 2];
}

double trunc_normal_at(
    TruncNormal normal, std::uint64_t seed, std::uint64_t stream, std::uint64_t index
) {
  return CutNormal(normal).at(uniform_at(seed, stream, index));
}

std::uint64_t index_below(
    std::uint64_t n, std::uint64_t seed, std::uint64_t stream, std::uint64_t index
) {
  HS_CHECK_GT(n, 0, "random: index_below: no integer lies below 0");
  __extension__ using Wide = unsigned __int128;
  const std::uint64_t num_rejected = (0 - n) % n;  // 2^64 mod n
  std::uint64_t bits = bits_at(seed, stream, index);
  // Each rejection (probability < n / 2^64) moves to a stream derived from this one.
  for (std::uint64_t attempt = 1;; ++attempt) {
    const Wide product = Wide{bits} * n;
    if (static_cast<std::uint64_t>(product) >= num_rejected) {
      return static_cast<std::uint64_t>(product >> 64);
    }
    bits = bits_at(seed, hash_combine(mix64(stream), attempt), index);
  }
}

void fill_uniform(
    std::span<float> values,
    std::uint64_t seed,
    std::uint64_t stream,
    std::uint64_t begin_index,
    double low,
    double high
) {
  fill_uniform_of(values, seed, stream, begin_index, low, high);
}

void fill_uniform(
    std::span<double> values,
    std::uint64_t seed,
    std::uint64_t stream,
    std::uint64_t begin_index,
    double low,
    double high
) {
  fill_uniform_of(values, seed, stream, begin_index, low, high);
}

void fill_normal(
    std::span<float> values,
    std::uint64_t seed,
    std::uint64_t stream,
    std::uint64_t begin_index,
    double mean,
    double stddev
) {
  fill_normal_of(values, seed, stream, begin_index, mean, stddev);
}

void fill_normal(
    std::span<double> values,
    std::uint64_t seed,
    std::uint64_t stream,
    std::uint64_t begin_index,
    double mean,
    double stddev
) {
  fill_normal_of(values, seed, stream, begin_index, mean, stddev);
}

void fill_trunc_normal(
    std::span<float> values,
    std::uint64_t seed,
    std::uint64_t stream,
    std::uint64_t begin_index,
    TruncNormal normal
) {
  fill_trunc_normal_of(values, seed, stream, begin_index, normal);
}

void fill_trunc_normal(
    std::span<double> values,
    std::uint64_t seed,
    std::uint64_t stream,
    std::uint64_t begin_index,
    TruncNormal normal
) {
  fill_trunc_normal_of(values, seed, stream, begin_index, normal);
}

PermutedIndex::PermutedIndex(std::uint64_t n, std::uint64_t seed, std::uint64_t stream)
    : n_(n), half_bits_(1) {
  HS_CHECK_GT(n, 0, "random: PermutedIndex: nothing to permute");
  const auto num_bits = static_cast<int>(std::bit_width(n - 1));
  half_bits_ = std::max(1, (num_bits + 1) / 2);
  for (std::size_t round = 0; round < kRounds; ++round) {
    round_keys_[round] = bits_at(seed, stream, round);
  }
}

std::uint64_t PermutedIndex::encipher(std::uint64_t value) const {
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  std::uint64_t left = value >> half_bits_;
  std::uint64_t right = value & mask;
  for (const std::uint64_t key : round_keys_) {
    const std::uint64_t mixed = left ^ (mix64(right ^ key) & mask);
    left = right;
    right = mixed;
  }
  return left << half_bits_ | right;
}

std::uint64_t PermutedIndex::operator()(std::uint64_t position) const {
  HS_CHECK_LT(position, n_, "random: PermutedIndex: position outside the permutation");
  // The cipher permutes a domain of at most 4 n; walking its cycle until it is back below n makes
  // it a permutation of [0, n).
  std::uint64_t value = position;
  do {
    value = encipher(value);
  } while (value >= n_);
  return value;
}

}  // namespace hypershard
