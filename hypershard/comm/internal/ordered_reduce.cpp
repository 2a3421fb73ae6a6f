// Why: see ordered_reduce.h. Works in blocks that stay in the first-level cache, so that memory is
// read and written once however many ranks there are; the loops are plain and compiled for
// several instruction sets.
#include "hypershard/comm/internal/ordered_reduce.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include <c10/util/Half.h>

#include "hypershard/comm/internal/dtype_text.h"
#include "hypershard/core/error.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// The sanitizers' runtimes are not up yet when the loader picks a clone.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define HS_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define HS_CLONES
#endif
// Elements at one index may be read and written through two of the pointers, never at two.
#define HS_LOOP _Pragma("GCC ivdep") for

namespace hypershard::comm::internal {
namespace {

constexpr std::int64_t kBlock = 2048;

struct Sum {
  template <class T>
  [[gnu::always_inline]] T operator()(T a, T b) const {
    return a + b;
  }
};
struct Max {
  template <class T>
  [[gnu::always_inline]] T operator()(T a, T b) const {
    return a > b || a != a ? a : b;
  }
};
struct Min {
  template <class T>
  [[gnu::always_inline]] T operator()(T a, T b) const {
    return a < b || a != a ? a : b;
  }
};

struct Bf16 {
  std::uint16_t bits;
};

/// An fp32 value that counts as what bf16 makes of it.
struct AsBf16 {
  float value;
};

/// Rounds to nearest even; every NaN becomes the one that torch writes.
[[gnu::always_inline]] inline Bf16 round_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  const bool nan = (bits & 0x7fffffffU) > 0x7f800000U;
  return {static_cast<std::uint16_t>(nan ? 0x7fc0U : rounded)};
}

template <class T>
[[gnu::always_inline]] inline T widen(T value) {
  return value;
}
[[gnu::always_inline]] inline float widen(Bf16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}
[[gnu::always_inline]] inline float widen(AsBf16 value) {
  return widen(round_to_bf16(value.value));
}

template <class Join, class T, class A, class B>
[[gnu::always_inline]] inline void join_loop(T* out, const A* a, const B* b, std::int64_t n) {
  HS_LOOP(std::int64_t i = 0; i < n; ++i) {
    out[i] = Join()(widen(a[i]), widen(b[i]));
  }
}

// One plain function a type and an operation: clones cannot be templates.
#define HS_JOIN(Join, T, A, B)                                                \
  HS_CLONES void join(Join, T* out, const A* a, const B* b, std::int64_t n) { \
    join_loop<Join>(out, a, b, n);                                            \
  }
HS_JOIN(Sum, float, float, float)
HS_JOIN(Max, float, float, float)
HS_JOIN(Min, float, float, float)
HS_JOIN(Sum, double, double, double)
HS_JOIN(Max, double, double, double)
HS_JOIN(Min, double, double, double)
HS_JOIN(Sum, float, float, Bf16)
HS_JOIN(Max, float, float, Bf16)
HS_JOIN(Min, float, float, Bf16)
HS_JOIN(Sum, float, float, AsBf16)
HS_JOIN(Max, float, float, AsBf16)
HS_JOIN(Min, float, float, AsBf16)
#undef HS_JOIN

HS_CLONES void convert(float* out, const Bf16* in, std::int64_t n) {
  HS_LOOP(std::int64_t i = 0; i < n; ++i) {
    out[i] = widen(in[i]);
  }
}

HS_CLONES void convert(double* out, const float* in, std::int64_t n) {
  HS_LOOP(std::int64_t i = 0; i < n; ++i) {
    out[i] = static_cast<double>(in[i]);
  }
}

HS_CLONES void convert(Bf16* out, const float* in, std::int64_t n) {
  HS_LOOP(std::int64_t i = 0; i < n; ++i) {
    out[i] = round_to_bf16(in[i]);
  }
}

HS_CLONES void convert(float* out, const AsBf16* in, std::int64_t n) {
  HS_LOOP(std::int64_t i = 0; i < n; ++i) {
    out[i] = widen(in[i]);
  }
}

HS_CLONES void convert(AsBf16* out, const float* in, std::int64_t n) {
  HS_LOOP(std::int64_t i = 0; i < n; ++i) {
    out[i].value = widen(round_to_bf16(in[i]));
  }
}

void convert(AsBf16* out, const AsBf16* in, std::int64_t n) {
  convert(&out->value, in, n);
}

#if defined(__x86_64__)
__attribute__((target("avx,f16c"))) std::int64_t convert_f16c(
    float* out, const c10::Half* in, std::int64_t n
) {
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(half));
  }
  return i;
}

__attribute__((target("avx,f16c"))) std::int64_t convert_f16c(
    c10::Half* out, const float* in, std::int64_t n
) {
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), half);
  }
  return i;
}

bool has_f16c() {
  static const bool has = __builtin_cpu_supports("f16c") != 0;
  return has;
}
#else
template <class Out, class In>
std::int64_t convert_f16c(Out*, const In*, std::int64_t) {
  return 0;
}
bool has_f16c() {
  return false;
}
#endif

void convert(float* out, const c10::Half* in, std::int64_t n) {
  for (std::int64_t i = has_f16c() ? convert_f16c(out, in, n) : 0; i < n; ++i) {
    out[i] = static_cast<float>(in[i]);
  }
}

void convert(c10::Half* out, const float* in, std::int64_t n) {
  for (std::int64_t i = has_f16c() ? convert_f16c(out, in, n) : 0; i < n; ++i) {
    out[i] = c10::Half(in[i]);
  }
}

template <class T>
void convert(T* out, const T* in, std::int64_t n) {
  if (out != in) {
    std::memcpy(out, in, static_cast<std::size_t>(n) * sizeof(T));
  }
}

template <class Half>
concept HalfType =
    std::is_same_v<Half, Bf16> || std::is_same_v<Half, c10::Half> || std::is_same_v<Half, AsBf16>;

template <HalfType Half>
void convert(double* out, const Half* in, std::int64_t n) {
  float wide[kBlock];
  convert(wide, in, n);
  convert(out, wide, n);
}

HS_CLONES void scale(float* values, float factor, std::int64_t n) {
  HS_LOOP(std::int64_t i = 0; i < n; ++i) {
    values[i] *= factor;
  }
}
HS_CLONES void scale(double* values, double factor, std::int64_t n) {
  HS_LOOP(std::int64_t i = 0; i < n; ++i) {
    values[i] *= factor;
  }
}
HS_CLONES void divide(float* values, float divisor, std::int64_t n) {
  HS_LOOP(std::int64_t i = 0; i < n; ++i) {
    values[i] /= divisor;
  }
}
HS_CLONES void divide(double* values, double divisor, std::int64_t n) {
  HS_LOOP(std::int64_t i = 0; i < n; ++i) {
    values[i] /= divisor;
  }
}

/// Divides a block that is still in the first-level cache. A power of two has an exact inverse, so
/// that multiplying by it gives the bits of the division.
template <class Acc>
void divide_block(Acc* values, double divisor, std::int64_t n) {
  int exponent = 0;
  if (divisor == 1) {
    return;
  }
  if (std::frexp(divisor, &exponent) == 0.5 && std::abs(exponent) < 64) {
    scale(values, static_cast<Acc>(1 / divisor), n);
  } else {
    divide(values, static_cast<Acc>(divisor), n);
  }
}

/// Joins `in` into `acc`; types that no loop reads directly pass through a block of their own.
template <class Join, class Acc, class In>
void join_into(Acc* acc, const In* in, std::int64_t n) {
  if constexpr (std::is_same_v<Acc, In> ||
                (std::is_same_v<Acc, float> &&
                 (std::is_same_v<In, Bf16> || std::is_same_v<In, AsBf16>))) {
    join(Join(), acc, acc, in, n);
  } else {
    Acc wide[kBlock];
    convert(wide, in, n);
    join(Join(), acc, acc, wide, n);
  }
}

struct Buffers {
  std::byte* output;
  std::span<const std::byte* const> inputs;
  std::int64_t numel;
  double divisor;
};

template <class In>
const In* block(const std::byte* input, std::int64_t begin) {
  return reinterpret_cast<const In*>(input) + begin;
}

template <class Join, class Out, class Acc, class In>
void reduce_blocks(const Buffers& buffers) {
  Out* out = reinterpret_cast<Out*>(buffers.output);
  const auto inputs = buffers.inputs;
  for (std::int64_t begin = 0; begin < buffers.numel; begin += kBlock) {
    const std::int64_t n = std::min(kBlock, buffers.numel - begin);
    if constexpr (std::is_same_v<Out, In> && std::is_same_v<Out, Acc>) {
      if (inputs.size() == 2) {
        join(Join(), out + begin, block<In>(inputs[0], begin), block<In>(inputs[1], begin), n);
        divide_block(out + begin, buffers.divisor, n);
        continue;
      }
    }
    // Not in the output itself: it may be an input whose turn is still to come.
    alignas(64) Acc acc[kBlock];
    convert(acc, block<In>(inputs[0], begin), n);
    for (std::size_t i = 1; i < inputs.size(); ++i) {
      join_into<Join>(acc, block<In>(inputs[i], begin), n);
    }
    divide_block(acc, buffers.divisor, n);
    convert(out + begin, acc, n);
  }
}

template <class Out, class Acc, class In>
void reduce_with(const Buffers& buffers, ReduceOp op) {
  if (buffers.inputs.size() == 1 && buffers.divisor == 1) {
    for (std::int64_t begin = 0; begin < buffers.numel; begin += kBlock) {
      Out* out = reinterpret_cast<Out*>(buffers.output) + begin;
      convert(out, block<In>(buffers.inputs[0], begin), std::min(kBlock, buffers.numel - begin));
    }
    return;
  }
  switch (op) {
    case ReduceOp::kSum:
      return reduce_blocks<Sum, Out, Acc, In>(buffers);
    case ReduceOp::kMax:
      return reduce_blocks<Max, Out, Acc, In>(buffers);
    case ReduceOp::kMin:
      return reduce_blocks<Min, Out, Acc, In>(buffers);
  }
}

template <class In>
void reduce_half(const Buffers& buffers, c10::ScalarType output_dtype, ReduceOp op) {
  switch (output_dtype) {
    case c10::kFloat:
      return reduce_with<float, float, In>(buffers, op);
    case c10::kDouble:
      return reduce_with<double, double, In>(buffers, op);
    default:
      return reduce_with<In, float, In>(buffers, op);
  }
}

}  // namespace

void ordered_reduce(
    std::byte* output,
    c10::ScalarType output_dtype,
    std::span<const std::byte* const> inputs,
    c10::ScalarType input_dtype,
    std::int64_t numel,
    Reduction reduction,
    bool rounds_result
) {
  HS_ASSERT(!inputs.empty(), "comm: a reduction of no inputs");
  const bool same = output_dtype == input_dtype;
  const bool to_wide = output_dtype == c10::kFloat || output_dtype == c10::kDouble;
  const Buffers buffers{output, inputs, numel, reduction.divisor};
  const ReduceOp op = reduction.op;
  if (reduction.wire.value_or(input_dtype) != input_dtype) {
    HS_ASSERT(
        input_dtype == c10::kFloat && *reduction.wire == c10::kBFloat16 && to_wide,
        "comm: no reduction from ",
        dtype_text(input_dtype),
        " through ",
        dtype_text(*reduction.wire),
        " to ",
        dtype_text(output_dtype)
    );
    if (output_dtype == c10::kDouble) {
      return reduce_with<double, double, AsBf16>(buffers, op);
    }
    return rounds_result ? reduce_with<AsBf16, float, AsBf16>(buffers, op)
                         : reduce_with<float, float, AsBf16>(buffers, op);
  }
  if (input_dtype == c10::kFloat && same) {
    return reduce_with<float, float, float>(buffers, op);
  }
  if (input_dtype == c10::kFloat && output_dtype == c10::kDouble) {
    return reduce_with<double, double, float>(buffers, op);
  }
  if (input_dtype == c10::kDouble && same) {
    return reduce_with<double, double, double>(buffers, op);
  }
  if (input_dtype == c10::kBFloat16 && (same || to_wide)) {
    return reduce_half<Bf16>(buffers, output_dtype, op);
  }
  if (input_dtype == c10::kHalf && (same || to_wide)) {
    return reduce_half<c10::Half>(buffers, output_dtype, op);
  }
  HS_ASSERT(
      false, "comm: no reduction from ", dtype_text(input_dtype), " to ", dtype_text(output_dtype)
  );
}

void round_to_wire(std::byte* output, const std::byte* input, std::int64_t numel) {
  convert(reinterpret_cast<Bf16*>(output), reinterpret_cast<const float*>(input), numel);
}

}  // namespace hypershard::comm::internal
