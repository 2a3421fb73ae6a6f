// Short vectors for the fused CPU kernels: plain C++ on the compiler's vector extension, one source
// for every width and dtype. HS_KERNEL compiles a function twice, for x86-64-v3 (AVX2, FMA) and for
// the baseline, and picks one at load time. Kernel files only.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "hypershard/nn/internal/element.h"

#define HS_INLINE inline __attribute__((always_inline))
#define HS_INLINE_LAMBDA __attribute__((always_inline))

// ThreadSanitizer does not survive the resolvers of multi-versioned functions, which run before it
// is set up.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#define HS_KERNEL __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define HS_KERNEL
#endif

namespace hypershard::nn::internal {

typedef float FloatPack __attribute__((vector_size(32)));
typedef double DoublePack __attribute__((vector_size(32)));
typedef std::int32_t IntPack __attribute__((vector_size(32)));
typedef std::uint32_t UintPack __attribute__((vector_size(32)));
typedef std::uint16_t HalfwordPack __attribute__((vector_size(16)));

template <class A>
using PackOf = std::conditional_t<std::is_same_v<A, double>, DoublePack, FloatPack>;

template <class A>
inline constexpr std::int64_t kLanes = static_cast<std::int64_t>(sizeof(PackOf<A>) / sizeof(A));

HS_INLINE float widen(Bf16 value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

HS_INLINE Bf16 narrow(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if (value != value) {
    return {0x7fc0};
  }
  return {static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)
  };  // to nearest, ties to even
}

/// Loads a pack `P`, or one element when `P` is a scalar, from memory of any of the element types.
template <class P, class T>
HS_INLINE P load(const T* from) {
  if constexpr (std::is_same_v<P, FloatPack> && std::is_same_v<T, Bf16>) {
    HalfwordPack halfwords;
    std::memcpy(&halfwords, from, sizeof(halfwords));
    const UintPack bits = __builtin_convertvector(halfwords, UintPack) << 16;
    P result;
    std::memcpy(&result, &bits, sizeof(result));
    return result;
  } else if constexpr (std::is_same_v<T, Bf16>) {
    return widen(*from);
  } else if constexpr (std::is_scalar_v<P>) {
    return *from;
  } else {
    P result;
    std::memcpy(&result, from, sizeof(result));
    return result;
  }
}

template <class P, class T>
HS_INLINE void store(T* to, P value) {
  if constexpr (std::is_same_v<P, FloatPack> && std::is_same_v<T, Bf16>) {
    UintPack bits;
    std::memcpy(&bits, &value, sizeof(bits));
    const UintPack is_nan = reinterpret_cast<UintPack>(value != value);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    bits = (is_nan & 0x7fc0) | (~is_nan & bits);
    const HalfwordPack halfwords = __builtin_convertvector(bits, HalfwordPack);
    std::memcpy(to, &halfwords, sizeof(halfwords));
  } else if constexpr (std::is_same_v<T, Bf16>) {
    *to = narrow(value);
  } else if constexpr (std::is_scalar_v<P>) {
    *to = static_cast<T>(value);
  } else {
    std::memcpy(to, &value, sizeof(value));
  }
}

/// Calls `body(i, zero)` for packs at i = 0, L, 2L, ..., then for the elements left; the type of
/// `zero` says which.
template <class A, class Body>
HS_INLINE void for_packs(std::int64_t n, const Body& body) {
  std::int64_t i = 0;
  for (; i + kLanes<A> <= n; i += kLanes<A>) {
    body(i, PackOf<A>{});
  }
  for (; i < n; ++i) {
    body(i, A{});
  }
}

/// A sum over packs and single elements, added up in a fixed order.
template <class A>
struct Sum {
  PackOf<A> packs = {};
  A singles = 0;

  HS_INLINE void add(PackOf<A> value) { packs += value; }
  HS_INLINE void add(A value) { singles += value; }
  HS_INLINE A total() const {
    A sum = singles;
    for (std::int64_t lane = 0; lane < kLanes<A>; ++lane) {
      sum += packs[lane];
    }
    return sum;
  }
};

HS_INLINE FloatPack larger(FloatPack a, FloatPack b) {
  return a > b ? a : b;
}
HS_INLINE DoublePack larger(DoublePack a, DoublePack b) {
  return a > b ? a : b;
}
HS_INLINE float larger(float a, float b) {
  return a > b ? a : b;
}
HS_INLINE double larger(double a, double b) {
  return a > b ? a : b;
}

/// e^x to about one unit in the last place; below -87 it is 0 and above 88 infinite or nearly so.
/// NaN stays NaN.
///
/// Source: x = n ln 2 + r with |r| <= ln 2 / 2 (ln 2 in two parts, Cody and Waite 1980), Taylor
/// series of degree 7 in r.
HS_INLINE FloatPack exponential(FloatPack x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const FloatPack bounded =
      x > 88.0f ? FloatPack{} + 88.0f : (x < -87.0f ? FloatPack{} - 87.0f : x);
  const FloatPack n = (bounded * 1.44269504f + kRound) - kRound;
  const FloatPack r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
  FloatPack p = r * (1.0f / 5040) + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * (r * r) + r;
  const IntPack exponent = (__builtin_convertvector(n, IntPack) + 127) << 23;
  FloatPack scale;
  std::memcpy(&scale, &exponent, sizeof(scale));
  const FloatPack result = p * scale + scale;
  return x < -87.0f ? FloatPack{} : result;
}

HS_INLINE DoublePack exponential(DoublePack x) {
  for (std::int64_t lane = 0; lane < kLanes<double>; ++lane) {
    x[lane] = std::exp(x[lane]);
  }
  return x;
}

// The scalar form gives the bits of the pack, so that a result does not depend on its place.
HS_INLINE float exponential(float x) {
  return exponential(FloatPack{} + x)[0];
}
HS_INLINE double exponential(double x) {
  return std::exp(x);
}

}  // namespace hypershard::nn::internal
