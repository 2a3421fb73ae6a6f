// Bodies of the fused CPU kernels. Written once as templates and compiled for three element types
// and two instruction sets.
#include "hypershard/nn/internal/cpu_kernels.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "hypershard/nn/internal/simd.h"

namespace hypershard::nn::internal {
namespace {

template <class T>
HS_INLINE void rms_norm_forward(
    const RmsNormForward<T>& k, std::int64_t begin, std::int64_t end, std::int64_t dim
) {
  using A = Compute<T>;
  for (std::int64_t row = begin; row < end; ++row) {
    const T* x = k.x + row * dim;
    T* y = k.y + row * dim;
    Sum<A> squares;
    for_packs<A>(dim, [&](std::int64_t i, auto zero) HS_INLINE_LAMBDA {
      const auto value = load<decltype(zero)>(x + i);
      squares.add(value * value);
    });
    const A rstd = A(1) / std::sqrt(squares.total() / static_cast<A>(dim) + static_cast<A>(k.eps));
    for_packs<A>(dim, [&](std::int64_t i, auto zero) HS_INLINE_LAMBDA {
      using P = decltype(zero);
      store(y + i, load<P>(x + i) * rstd * load<P>(k.weight + i));
    });
    k.rstd[row] = rstd;
  }
}

// With n = x rstd and g = weight grad_y: grad_x = rstd (g - n mean(g n)), grad_weight = sum over
// rows of grad_y n.
template <class T>
HS_INLINE void rms_norm_backward(
    const RmsNormBackward<T>& k, std::int64_t begin, std::int64_t end, std::int64_t dim
) {
  using A = Compute<T>;
  for (std::int64_t row = begin; row < end; ++row) {
    const T* x = k.x + row * dim;
    const T* grad_y = k.grad_y + row * dim;
    T* grad_x = k.grad_x + row * dim;
    const A rstd = k.rstd[row];
    Sum<A> products;
    for_packs<A>(dim, [&](std::int64_t i, auto zero) HS_INLINE_LAMBDA {
      using P = decltype(zero);
      const P along = load<P>(grad_y + i) * load<P>(x + i);
      products.add(along * load<P>(k.weight + i));
      store(k.grad_weight + i, load<P>(k.grad_weight + i) + along * rstd);
    });
    const A slope = products.total() * rstd * rstd / static_cast<A>(dim);
    for_packs<A>(dim, [&](std::int64_t i, auto zero) HS_INLINE_LAMBDA {
      using P = decltype(zero);
      const P g = load<P>(grad_y + i) * load<P>(k.weight + i);
      store(grad_x + i, (g - load<P>(x + i) * slope) * rstd);
    });
  }
}

template <class T>
HS_INLINE void swiglu_forward(const SwigluForward<T>& k, std::int64_t begin, std::int64_t end) {
  using A = Compute<T>;
  for_packs<A>(end - begin, [&](std::int64_t offset, auto zero) HS_INLINE_LAMBDA {
    using P = decltype(zero);
    const std::int64_t i = begin + offset;
    const P gate = load<P>(k.gate + i);
    store(k.h + i, gate / (exponential(-gate) + A(1)) * load<P>(k.up + i));
  });
}

// With s = sigmoid(gate): d silu / d gate = s (1 + gate (1 - s)).
template <class T>
HS_INLINE void swiglu_backward(const SwigluBackward<T>& k, std::int64_t begin, std::int64_t end) {
  using A = Compute<T>;
  for_packs<A>(end - begin, [&](std::int64_t offset, auto zero) HS_INLINE_LAMBDA {
    using P = decltype(zero);
    const std::int64_t i = begin + offset;
    const P gate = load<P>(k.gate + i);
    const P grad = load<P>(k.grad_h + i);
    const P s = A(1) / (exponential(-gate) + A(1));
    const P silu = gate * s;
    store(k.grad_up + i, grad * silu);
    store(k.grad_gate + i, grad * load<P>(k.up + i) * (s + silu * (A(1) - s)));
  });
}

template <class T>
HS_INLINE void rotate(const Rotate<T>& k, std::int64_t begin, std::int64_t end) {
  using A = Compute<T>;
  const A sign = k.backwards ? A(-1) : A(1);
  for (std::int64_t position = begin; position < end; ++position) {
    const A* cosine = k.cosine + position * k.half;
    const A* sine = k.sine + position * k.half;
    for (std::int64_t head = 0; head < k.heads; ++head) {
      const T* x = k.x + position * k.x_position_stride + head * k.x_head_stride;
      T* y = k.y + (position * k.heads + head) * 2 * k.half;
      for_packs<A>(k.half, [&](std::int64_t i, auto zero) HS_INLINE_LAMBDA {
        using P = decltype(zero);
        const P a = load<P>(x + i);
        const P b = load<P>(x + k.half + i);
        const P c = load<P>(cosine + i);
        const P s = load<P>(sine + i) * sign;
        store(y + i, a * c - b * s);
        store(y + k.half + i, a * s + b * c);
      });
    }
  }
}

template <class A>
struct LogSum {
  A largest;
  A log_sum;  // of the exponentials of differences to the largest
};

template <class A, class T>
HS_INLINE LogSum<A> log_sum_of_row(const T* logits, std::int64_t classes) {
  PackOf<A> largest_pack = PackOf<A>{} + load<A>(logits);
  A largest = load<A>(logits);
  for_packs<A>(classes, [&](std::int64_t i, auto zero) HS_INLINE_LAMBDA {
    if constexpr (std::is_scalar_v<decltype(zero)>) {
      largest = larger(load<A>(logits + i), largest);
    } else {
      largest_pack = larger(load<PackOf<A>>(logits + i), largest_pack);
    }
  });
  for (std::int64_t lane = 0; lane < kLanes<A>; ++lane) {
    largest = larger(largest_pack[lane], largest);
  }
  Sum<A> sum;
  for_packs<A>(classes, [&](std::int64_t i, auto zero) HS_INLINE_LAMBDA {
    sum.add(exponential(load<decltype(zero)>(logits + i) - largest));
  });
  return {largest, std::log(sum.total())};
}

template <class T>
HS_INLINE void cross_entropy_forward(
    const CrossEntropyForward<T>& k, std::int64_t begin, std::int64_t end
) {
  using A = Compute<T>;
  for (std::int64_t row = begin; row < end; ++row) {
    const T* logits = k.logits + row * k.classes;
    if (k.targets[row] < 0) {
      k.log_sum_exp[row] = 0;
      k.loss[row] = 0;
      continue;
    }
    const LogSum<A> sum = log_sum_of_row<A>(logits, k.classes);
    k.log_sum_exp[row] = sum.largest + sum.log_sum;
    k.loss[row] = static_cast<double>(sum.largest - load<A>(logits + k.targets[row])) +
                  static_cast<double>(sum.log_sum);
  }
}

template <class T>
HS_INLINE void cross_entropy_part(
    const CrossEntropyPart<T>& k, std::int64_t begin, std::int64_t end
) {
  using A = Compute<T>;
  for (std::int64_t row = begin; row < end; ++row) {
    const T* logits = k.logits + row * k.classes;
    const std::int64_t target = k.targets[row] - k.first_class;
    const bool is_here = k.targets[row] >= 0 && target >= 0 && target < k.classes;
    k.at_target[row] = is_here ? load<A>(logits + target) : A(0);
    if (k.targets[row] < 0) {
      k.log_sum_exp[row] = 0;
    } else if (k.classes == 0) {
      k.log_sum_exp[row] = -std::numeric_limits<A>::infinity();
    } else {
      const LogSum<A> sum = log_sum_of_row<A>(logits, k.classes);
      k.log_sum_exp[row] = sum.largest + sum.log_sum;
    }
  }
}

template <class T>
HS_INLINE void cross_entropy_backward(
    const CrossEntropyBackward<T>& k, std::int64_t begin, std::int64_t end
) {
  using A = Compute<T>;
  for (std::int64_t row = begin; row < end; ++row) {
    const T* logits = k.logits + row * k.classes;
    T* grad = k.grad_logits + row * k.classes;
    const std::int64_t target = k.targets[row];
    const A scale = target < 0 ? A(0) : static_cast<A>(k.scale);
    const A shift = k.log_sum_exp[row];
    if (target < 0) {
      for_packs<A>(k.classes, [&](std::int64_t i, auto zero) HS_INLINE_LAMBDA {
        store(grad + i, zero);
      });
      continue;
    }
    for_packs<A>(k.classes, [&](std::int64_t i, auto zero) HS_INLINE_LAMBDA {
      store(grad + i, exponential(load<decltype(zero)>(logits + i) - shift) * scale);
    });
    const std::int64_t here = target - k.first_class;
    if (here >= 0 && here < k.classes) {
      const A at_target = exponential(load<A>(logits + here) - shift);
      store(grad + here, (at_target - A(1)) * scale);
    }
  }
}

template <class To, class From>
HS_INLINE void add(To* to, const From* from, std::int64_t n) {
  using A =
      std::conditional_t<std::is_same_v<To, double> || std::is_same_v<From, double>, double, float>;
  if constexpr (std::is_same_v<A, double> &&
                !(std::is_same_v<To, double> && std::is_same_v<From, double>)) {
    for (std::int64_t i = 0; i < n; ++i) {
      store(
          to + i,
          static_cast<Compute<To>>(
              static_cast<double>(load<Compute<To>>(to + i)) +
              static_cast<double>(load<Compute<From>>(from + i))
          )
      );
    }
  } else {
    for_packs<A>(n, [&](std::int64_t i, auto zero) HS_INLINE_LAMBDA {
      using P = decltype(zero);
      store(to + i, load<P>(to + i) + load<P>(from + i));
    });
  }
}

}  // namespace

#define HS_DEFINE_KERNELS(T)                                                                 \
  HS_KERNEL void run_rms_norm_forward(                                                       \
      const RmsNormForward<T>& args, std::int64_t begin, std::int64_t end, std::int64_t dim  \
  ) {                                                                                        \
    rms_norm_forward(args, begin, end, dim);                                                 \
  }                                                                                          \
  HS_KERNEL void run_rms_norm_backward(                                                      \
      const RmsNormBackward<T>& args, std::int64_t begin, std::int64_t end, std::int64_t dim \
  ) {                                                                                        \
    rms_norm_backward(args, begin, end, dim);                                                \
  }                                                                                          \
  HS_KERNEL void run_swiglu_forward(                                                         \
      const SwigluForward<T>& args, std::int64_t begin, std::int64_t end                     \
  ) {                                                                                        \
    swiglu_forward(args, begin, end);                                                        \
  }                                                                                          \
  HS_KERNEL void run_swiglu_backward(                                                        \
      const SwigluBackward<T>& args, std::int64_t begin, std::int64_t end                    \
  ) {                                                                                        \
    swiglu_backward(args, begin, end);                                                       \
  }                                                                                          \
  HS_KERNEL void run_rotate(const Rotate<T>& args, std::int64_t begin, std::int64_t end) {   \
    rotate(args, begin, end);                                                                \
  }                                                                                          \
  HS_KERNEL void run_cross_entropy_forward(                                                  \
      const CrossEntropyForward<T>& args, std::int64_t begin, std::int64_t end               \
  ) {                                                                                        \
    cross_entropy_forward(args, begin, end);                                                 \
  }                                                                                          \
  HS_KERNEL void run_cross_entropy_part(                                                     \
      const CrossEntropyPart<T>& args, std::int64_t begin, std::int64_t end                  \
  ) {                                                                                        \
    cross_entropy_part(args, begin, end);                                                    \
  }                                                                                          \
  HS_KERNEL void run_cross_entropy_backward(                                                 \
      const CrossEntropyBackward<T>& args, std::int64_t begin, std::int64_t end              \
  ) {                                                                                        \
    cross_entropy_backward(args, begin, end);                                                \
  }                                                                                          \
  HS_KERNEL void add_to(float* to, const T* from, std::int64_t n) {                          \
    add(to, from, n);                                                                        \
  }                                                                                          \
  HS_KERNEL void add_to(double* to, const T* from, std::int64_t n) {                         \
    add(to, from, n);                                                                        \
  }                                                                                          \
  HS_KERNEL void add_to(Bf16* to, const T* from, std::int64_t n) {                           \
    add(to, from, n);                                                                        \
  }

HS_DEFINE_KERNELS(float)
HS_DEFINE_KERNELS(double)
HS_DEFINE_KERNELS(Bf16)
#undef HS_DEFINE_KERNELS

}  // namespace hypershard::nn::internal
