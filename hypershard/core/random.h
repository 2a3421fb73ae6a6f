// Why: same seed, same numbers, whatever the mesh. Every random number is a pure function of
// (seed, stream, index), so any rank can compute any slice of a tensor without the rest.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "hypershard/core/hash.h"

namespace hypershard {

/// Enciphers a 128-bit counter under a 64-bit key, ten rounds.
///
/// Source: Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
std::array<std::uint32_t, 4> philox4x32(
    std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key
);

// NOTE [random streams]
// A sequence of random numbers is named by (seed, stream). The functions below are pure: equal
// arguments give equal bits on every rank and thread (for the normal distributions given the same C
// math library). The kinds of one stream share their bits, so give each purpose a stream of its
// own, usually `stream_of("weights/blocks.3.mlp.w1")`. Threads: all may be called concurrently.

/// Returns 64 random bits.
std::uint64_t bits_at(std::uint64_t seed, std::uint64_t stream, std::uint64_t index);
/// Returns a uniform number in [0, 1), a multiple of 2^-53.
double uniform_at(std::uint64_t seed, std::uint64_t stream, std::uint64_t index);
/// Returns a number of the standard normal distribution.
///
/// Source: Box, Muller: "A note on the generation of random normal deviates", 1958; double
/// precision.
double normal_at(std::uint64_t seed, std::uint64_t stream, std::uint64_t index);
/// Returns a uniform integer in [0, n), every one exactly equally likely.
///
/// Errors: InvalidArgument if n is 0.
/// Source: Lemire: "Fast random integer generation in an interval", 2019.
std::uint64_t index_below(
    std::uint64_t n, std::uint64_t seed, std::uint64_t stream, std::uint64_t index
);

/// A normal distribution cut at `low` and `high`, given as values (not in standard deviations).
struct TruncNormal {
  double mean = 0;
  double stddev = 1;
  double low = -2;
  double high = 2;
};

/// Returns a number of the cut normal distribution, by inverting its distribution function.
///
/// Errors: InvalidArgument if a field is not finite, stddev <= 0 or low >= high.
/// Source: Wichura: "Algorithm AS 241: the percentage points of the normal distribution", 1988.
double trunc_normal_at(
    TruncNormal normal, std::uint64_t seed, std::uint64_t stream, std::uint64_t index
);

/// Fills `values[i]` with low + (high - low) * uniform_at(seed, stream, begin_index + i), below
/// `high`.
///
/// Fills of adjacent slices give the bits of one fill of the whole; a float is the double rounded.
/// Errors: InvalidArgument if a bound is not finite or low > high.
void fill_uniform(
    std::span<float> values,
    std::uint64_t seed,
    std::uint64_t stream,
    std::uint64_t begin_index,
    double low = 0,
    double high = 1
);
void fill_uniform(
    std::span<double> values,
    std::uint64_t seed,
    std::uint64_t stream,
    std::uint64_t begin_index,
    double low = 0,
    double high = 1
);

/// Fills `values[i]` with mean + stddev * normal_at(seed, stream, begin_index + i); slices as
/// above.
///
/// Errors: InvalidArgument if an argument is not finite or stddev < 0.
void fill_normal(
    std::span<float> values,
    std::uint64_t seed,
    std::uint64_t stream,
    std::uint64_t begin_index,
    double mean = 0,
    double stddev = 1
);
void fill_normal(
    std::span<double> values,
    std::uint64_t seed,
    std::uint64_t stream,
    std::uint64_t begin_index,
    double mean = 0,
    double stddev = 1
);

/// Fills `values[i]` with trunc_normal_at(normal, seed, stream, begin_index + i); slices as above.
void fill_trunc_normal(
    std::span<float> values,
    std::uint64_t seed,
    std::uint64_t stream,
    std::uint64_t begin_index,
    TruncNormal normal = {}
);
void fill_trunc_normal(
    std::span<double> values,
    std::uint64_t seed,
    std::uint64_t stream,
    std::uint64_t begin_index,
    TruncNormal normal = {}
);

/// A random order of 0 ... n-1 in constant memory: shuffles a data set without a list of its items.
///
/// Threads: const methods may run concurrently.
/// Source: Feistel network with cycle walking; Black, Rogaway: "Ciphers with arbitrary finite
/// domains", CT-RSA 2002.
class PermutedIndex {
 public:
  /// Errors: InvalidArgument if n is 0.
  PermutedIndex(std::uint64_t n, std::uint64_t seed, std::uint64_t stream = 0);

  /// Returns the item at `position`; over all positions each item comes once.
  /// Errors: InvalidArgument if position >= size().
  std::uint64_t operator()(std::uint64_t position) const;
  std::uint64_t size() const { return n_; }

 private:
  static constexpr std::size_t kRounds = 10;

  std::uint64_t encipher(std::uint64_t value) const;

  std::uint64_t n_;
  int half_bits_;
  std::array<std::uint64_t, kRounds> round_keys_{};
};

}  // namespace hypershard
