// Bodies of the attention kernels: one query tile at a time against all keys that its last row may
// see. Names: scores S = scale Q K^T, probabilities P, D = rowsum(grad_out * out) as in the paper's
// appendix B.
#include "hypershard/nn/internal/attention_kernel.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>

#include "hypershard/nn/internal/simd.h"
#include "hypershard/nn/internal/small_matmul.h"

namespace hypershard::nn::internal {
namespace {

constexpr std::int64_t kTile = 32;            // query rows at a time
constexpr std::int64_t kMaxPositions = 4096;  // a tile of scores stays within a core's cache

template <class A>
std::int64_t padded(std::int64_t positions) {
  return (positions + kLanes<A> - 1) / kLanes<A> * kLanes<A>;
}

/// A head's matrix [positions, head_dim] in the compute type.
template <class A>
struct Matrix {
  const A* data;
  std::int64_t stride;

  const A* row(std::int64_t i) const { return data + i * stride; }
};

/// Returns the head as it lies in memory, or a widened copy in `space`.
template <class T, class A>
HS_INLINE Matrix<A> head_matrix(
    const HeadsView<const T>& view,
    std::int64_t batch,
    std::int64_t head,
    const AttentionShape& shape,
    A* space
) {
  const T* from = view.head(batch, head);
  if constexpr (std::is_same_v<T, A>) {
    return {from, view.position_stride};
  } else {
    for (std::int64_t i = 0; i < shape.positions; ++i) {
      for_packs<A>(shape.head_dim, [&](std::int64_t j, auto zero) HS_INLINE_LAMBDA {
        store(
            space + i * shape.head_dim + j,
            load<decltype(zero)>(from + i * view.position_stride + j)
        );
      });
    }
    return {space, shape.head_dim};
  }
}

/// Writes the transposed matrix [head_dim, padded positions], zeros behind the last position.
template <class A>
HS_INLINE void transpose(const Matrix<A>& from, const AttentionShape& shape, A* to) {
  const std::int64_t columns = padded<A>(shape.positions);
  for (std::int64_t i = 0; i < columns; ++i) {
    for (std::int64_t j = 0; j < shape.head_dim; ++j) {
      to[j * columns + i] = i < shape.positions ? from.row(i)[j] : A(0);
    }
  }
}

template <class T, class A>
HS_INLINE void store_rows(
    T* to, std::int64_t to_stride, const A* from, std::int64_t rows, std::int64_t head_dim
) {
  for (std::int64_t i = 0; i < rows; ++i) {
    for_packs<A>(head_dim, [&](std::int64_t j, auto zero) HS_INLINE_LAMBDA {
      store(to + i * to_stride + j, load<decltype(zero)>(from + i * head_dim + j));
    });
  }
}

/// Turns row `query` of the scores into exp(scale (s - max)) and zeros behind it; returns the sum
/// and sets the scaled maximum.
template <class A>
HS_INLINE A exponentiate(A* scores, std::int64_t query, std::int64_t columns, A scale, A* shift) {
  const std::int64_t visible = query + 1;
  for (std::int64_t j = visible; j < columns; ++j) {
    scores[j] = scores[0];  // a visible score: leaves the maximum alone
  }
  PackOf<A> largest_pack = PackOf<A>{} + scores[0];
  for (std::int64_t j = 0; j < columns; j += kLanes<A>) {
    largest_pack = larger(load<PackOf<A>>(scores + j), largest_pack);
  }
  A largest = largest_pack[0];
  for (std::int64_t lane = 1; lane < kLanes<A>; ++lane) {
    largest = larger(largest_pack[lane], largest);
  }
  for (std::int64_t j = 0; j < columns; j += kLanes<A>) {
    store(scores + j, exponential((load<PackOf<A>>(scores + j) - largest) * scale));
  }
  for (std::int64_t j = visible; j < columns; ++j) {
    scores[j] = 0;
  }
  Sum<A> sum;
  for (std::int64_t j = 0; j < columns; j += kLanes<A>) {
    sum.add(load<PackOf<A>>(scores + j));
  }
  *shift = largest * scale;
  return sum.total();
}

template <class A>
struct ForwardSpace {
  explicit ForwardSpace(const AttentionShape& shape, bool widens)
      : head(shape.positions * shape.head_dim),
        memory(new A[static_cast<std::size_t>(
            shape.head_dim * padded<A>(shape.positions) + kTile * padded<A>(shape.positions) +
            kTile * shape.head_dim + (widens ? 3 * head : 0)
        )]) {
    keys = memory.get();
    scores = keys + shape.head_dim * padded<A>(shape.positions);
    tile = scores + kTile * padded<A>(shape.positions);
    wide = tile + kTile * shape.head_dim;
  }
  std::int64_t head;
  std::unique_ptr<A[]> memory;
  A* keys;    // transposed
  A* scores;  // of one tile
  A* tile;    // result of one tile
  A* wide;    // q, k, v of a narrow type
};

/// All query tiles of one head.
template <class T, class A>
HS_INLINE void forward_head(
    const AttentionShape& shape,
    const ForwardSpace<A>& space,
    const Matrix<A>& q,
    const Matrix<A>& v,
    A* log_sum_exp,
    T* out,
    std::int64_t out_stride
) {
  const A scale = static_cast<A>(shape.scale);
  const std::int64_t stride = padded<A>(shape.positions);
  const std::int64_t dim = shape.head_dim;
  for (std::int64_t first = 0; first < shape.positions; first += kTile) {
    const std::int64_t rows = std::min(kTile, shape.positions - first);
    const std::int64_t seen = first + rows;
    const std::int64_t columns = padded<A>(seen);
    const LeftOperand<A> q_rows{q.row(first), q.stride, 1};
    multiply<false>(q_rows, space.keys, stride, space.scores, stride, rows, columns, dim);
    A inverse[kTile];
    for (std::int64_t i = 0; i < rows; ++i) {
      A shift;
      const A sum = exponentiate(space.scores + i * stride, first + i, columns, scale, &shift);
      inverse[i] = A(1) / sum;
      log_sum_exp[first + i] = shift + std::log(sum);
    }
    const LeftOperand<A> p_rows{space.scores, stride, 1};
    multiply<false>(p_rows, v.data, v.stride, space.tile, dim, rows, dim, seen);
    for (std::int64_t i = 0; i < rows; ++i) {
      for_packs<A>(dim, [&](std::int64_t j, auto zero) HS_INLINE_LAMBDA {
        const auto sum = load<decltype(zero)>(space.tile + i * dim + j);
        store(out + (first + i) * out_stride + j, sum * inverse[i]);
      });
    }
  }
}

template <class T>
HS_INLINE void attention_forward(
    const AttentionForward<T>& args, std::int64_t begin, std::int64_t end
) {
  using A = Compute<T>;
  const AttentionShape& shape = args.shape;
  const std::int64_t group = shape.heads / shape.kv_heads;
  const ForwardSpace<A> space(shape, !std::is_same_v<T, A>);
  for (std::int64_t index = begin; index < end; ++index) {
    const std::int64_t batch = index / shape.kv_heads;
    const std::int64_t kv_head = index % shape.kv_heads;
    const auto k = head_matrix(args.k, batch, kv_head, shape, space.wide);
    const auto v = head_matrix(args.v, batch, kv_head, shape, space.wide + space.head);
    transpose(k, shape, space.keys);
    for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      forward_head(
          shape,
          space,
          head_matrix(args.q, batch, head, shape, space.wide + 2 * space.head),
          v,
          args.log_sum_exp + (batch * shape.heads + head) * shape.positions,
          args.out.head(batch, head),
          args.out.position_stride
      );
    }
  }
}

template <class A>
struct BackwardSpace {
  explicit BackwardSpace(const AttentionShape& shape, bool widens)
      : head(shape.positions * shape.head_dim),
        memory(new A[static_cast<std::size_t>(
            2 * shape.head_dim * padded<A>(shape.positions) +
            2 * kTile * padded<A>(shape.positions) + kTile * shape.head_dim + 2 * head +
            (widens ? 5 * head : 0)
        )]) {
    keys = memory.get();
    values = keys + shape.head_dim * padded<A>(shape.positions);
    scores = values + shape.head_dim * padded<A>(shape.positions);
    grad_scores = scores + kTile * padded<A>(shape.positions);
    tile = grad_scores + kTile * padded<A>(shape.positions);
    grad_k = tile + kTile * shape.head_dim;
    grad_v = grad_k + head;
    wide = grad_v + head;
  }
  std::int64_t head;
  std::unique_ptr<A[]> memory;
  A* keys;         // transposed
  A* values;       // transposed
  A* scores;       // of one tile, then probabilities
  A* grad_scores;  // of one tile
  A* tile;         // gradient of one tile of queries
  A* grad_k;       // of one key head
  A* grad_v;
  A* wide;  // k, v, q, out, grad_out of a narrow type
};

/// P = exp(scale s - log_sum_exp) and dS = P (dP - D) scale for one row; both zero behind the
/// query.
template <class A>
HS_INLINE void differentiate_row(
    A* scores, A* grad_scores, std::int64_t query, std::int64_t columns, A scale, A log_sum_exp, A d
) {
  for (std::int64_t j = query + 1; j < columns; ++j) {
    scores[j] = 0;  // keeps the exponentials of unseen scores finite
    grad_scores[j] = 0;
  }
  for (std::int64_t j = 0; j < columns; j += kLanes<A>) {
    const auto p = exponential(load<PackOf<A>>(scores + j) * scale - log_sum_exp);
    store(scores + j, p);
    store(grad_scores + j, p * (load<PackOf<A>>(grad_scores + j) - d) * scale);
  }
  for (std::int64_t j = query + 1; j < columns; ++j) {
    scores[j] = 0;
    grad_scores[j] = 0;
  }
}

template <class A>
HS_INLINE A dot(const A* a, const A* b, std::int64_t n) {
  Sum<A> sum;
  for_packs<A>(n, [&](std::int64_t i, auto zero) HS_INLINE_LAMBDA {
    sum.add(load<decltype(zero)>(a + i) * load<decltype(zero)>(b + i));
  });
  return sum.total();
}

/// What the backward pass reads of one query head and its key head.
template <class A>
struct HeadInputs {
  Matrix<A> q, k, out, grad_out;
  const A* log_sum_exp;
};

/// All query tiles of one head; adds to the gradients of its key head in `space`.
template <class T, class A>
HS_INLINE void backward_head(
    const AttentionShape& shape,
    const BackwardSpace<A>& space,
    const HeadInputs<A>& in,
    T* grad_q,
    std::int64_t grad_q_stride
) {
  const A scale = static_cast<A>(shape.scale);
  const std::int64_t stride = padded<A>(shape.positions);
  const std::int64_t dim = shape.head_dim;
  for (std::int64_t first = 0; first < shape.positions; first += kTile) {
    const std::int64_t rows = std::min(kTile, shape.positions - first);
    const std::int64_t seen = first + rows;
    const std::int64_t columns = padded<A>(seen);
    const A* q = in.q.row(first);
    const A* grad_out = in.grad_out.row(first);
    const LeftOperand<A> q_rows{q, in.q.stride, 1};
    const LeftOperand<A> grad_out_rows{grad_out, in.grad_out.stride, 1};
    multiply<false>(q_rows, space.keys, stride, space.scores, stride, rows, columns, dim);
    multiply<false>(
        grad_out_rows, space.values, stride, space.grad_scores, stride, rows, columns, dim
    );
    for (std::int64_t i = 0; i < rows; ++i) {
      const std::int64_t query = first + i;
      const A d = dot(in.grad_out.row(query), in.out.row(query), dim);
      A* scores = space.scores + i * stride;
      A* grad_scores = space.grad_scores + i * stride;
      differentiate_row(scores, grad_scores, query, columns, scale, in.log_sum_exp[query], d);
    }
    const LeftOperand<A> p_by_key{space.scores, 1, stride};
    const LeftOperand<A> grad_by_key{space.grad_scores, 1, stride};
    const LeftOperand<A> grad_by_query{space.grad_scores, stride, 1};
    multiply<true>(p_by_key, grad_out, in.grad_out.stride, space.grad_v, dim, seen, dim, rows);
    multiply<true>(grad_by_key, q, in.q.stride, space.grad_k, dim, seen, dim, rows);
    multiply<false>(grad_by_query, in.k.data, in.k.stride, space.tile, dim, rows, dim, seen);
    store_rows(grad_q + first * grad_q_stride, grad_q_stride, space.tile, rows, dim);
  }
}

template <class T>
HS_INLINE void attention_backward(
    const AttentionBackward<T>& args, std::int64_t begin, std::int64_t end
) {
  using A = Compute<T>;
  const AttentionShape& shape = args.shape;
  const std::int64_t group = shape.heads / shape.kv_heads;
  const BackwardSpace<A> space(shape, !std::is_same_v<T, A>);
  const auto wide = [&](std::int64_t index) { return space.wide + index * space.head; };
  for (std::int64_t index = begin; index < end; ++index) {
    const std::int64_t batch = index / shape.kv_heads;
    const std::int64_t kv_head = index % shape.kv_heads;
    const auto k = head_matrix(args.k, batch, kv_head, shape, wide(0));
    const auto v = head_matrix(args.v, batch, kv_head, shape, wide(1));
    transpose(k, shape, space.keys);
    transpose(v, shape, space.values);
    std::fill_n(space.grad_k, 2 * space.head, A(0));  // grad_v lies behind it
    for (std::int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      const HeadInputs<A> in{
          head_matrix(args.q, batch, head, shape, wide(2)),
          k,
          head_matrix(args.out, batch, head, shape, wide(3)),
          head_matrix(args.grad_out, batch, head, shape, wide(4)),
          args.log_sum_exp + (batch * shape.heads + head) * shape.positions
      };
      backward_head(shape, space, in, args.grad_q.head(batch, head), args.grad_q.position_stride);
    }
    const auto store_gradient = [&](const HeadsView<T>& to, const A* from) HS_INLINE_LAMBDA {
      T* rows = to.head(batch, kv_head);
      store_rows(rows, to.position_stride, from, shape.positions, shape.head_dim);
    };
    store_gradient(args.grad_k, space.grad_k);
    store_gradient(args.grad_v, space.grad_v);
  }
}

}  // namespace

bool attention_kernel_fits(const AttentionShape& shape, bool is_double) {
  const std::int64_t lanes = is_double ? kLanes<double> : kLanes<float>;
  return shape.positions <= kMaxPositions && shape.head_dim % lanes == 0;
}

#define HS_DEFINE_KERNELS(T)                                                 \
  HS_KERNEL void run_attention_forward(                                      \
      const AttentionForward<T>& args, std::int64_t begin, std::int64_t end  \
  ) {                                                                        \
    attention_forward(args, begin, end);                                     \
  }                                                                          \
  HS_KERNEL void run_attention_backward(                                     \
      const AttentionBackward<T>& args, std::int64_t begin, std::int64_t end \
  ) {                                                                        \
    attention_backward(args, begin, end);                                    \
  }

HS_DEFINE_KERNELS(float)
HS_DEFINE_KERNELS(double)
HS_DEFINE_KERNELS(Bf16)
#undef HS_DEFINE_KERNELS

}  // namespace hypershard::nn::internal
