// Why: see shared_call.h.
// Runs are whole cache lines of every dtype, so that no two ranks write into one.
#include "hypershard/comm/shm/internal/shared_call.h"

#include <algorithm>

namespace hypershard::comm::internal {
namespace {

constexpr std::int64_t kRunElements = 64;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

std::int64_t prefix(const std::int64_t* counts, int end) {
  std::int64_t sum = 0;
  for (int i = 0; i < end; ++i) {
    sum += counts[i];
  }
  return sum;
}

}  // namespace

Cut::Cut(
    Op op, int size, std::int64_t numel, std::int64_t element_bytes, const SharedOptions& options
)
    : op_(op), size_(size), numel_(numel) {
  const bool one_slice = op == Op::kAllGather || op == Op::kBroadcast;
  const std::int64_t slices = one_slice ? 1 : size;
  const std::int64_t elements = options.step_bytes / std::max<std::int64_t>(1, element_bytes);
  run_ = std::max(kRunElements, elements / slices / kRunElements * kRunElements);
  tiny_ = op == Op::kAllReduce && numel * element_bytes <= options.tiny_bytes;
}

std::int64_t Cut::slice_run(const std::int64_t* counts, int reader, std::int64_t step) const {
  return std::clamp(counts[reader] - step * run_, std::int64_t{0}, run_);
}

std::int64_t Cut::num_steps(const std::int64_t* counts, int source) const {
  switch (op_) {
    case Op::kAllGather:
      return ceil_div(counts[source], run_);
    case Op::kBroadcast:
      return ceil_div(numel_, run_);
    case Op::kAllReduce:
      return ceil_div(numel_, run_ * size_);
    case Op::kReduceScatter:
    case Op::kAllToAll:
      return ceil_div(*std::max_element(counts, counts + size_), run_);
    case Op::kBarrier:
      return 0;
  }
  return 0;
}

std::int64_t Cut::step_numel(const std::int64_t* counts, int source, std::int64_t step) const {
  if (op_ == Op::kReduceScatter || op_ == Op::kAllToAll) {
    std::int64_t sum = 0;
    for (int reader = 0; reader < size_; ++reader) {
      sum += reader == source ? 0 : slice_run(counts, reader, step);
    }
    return sum;
  }
  if (op_ == Op::kAllReduce) {
    return std::min(run_ * size_, numel_ - step * run_ * size_);
  }
  return piece(counts, source, 0, step).numel;
}

Piece Cut::piece(const std::int64_t* counts, int source, int reader, std::int64_t step) const {
  const std::int64_t begin = step * run_;
  switch (op_) {
    case Op::kAllGather:
      return {begin, std::min(run_, counts[source] - begin), 0};
    case Op::kBroadcast:
      return {begin, std::min(run_, numel_ - begin), 0};
    case Op::kAllReduce: {
      const std::int64_t chunk = step * run_ * size_;
      const std::int64_t length = std::min(run_ * size_, numel_ - chunk);
      if (tiny_) {
        return {chunk, length, 0};
      }
      // Whole runs of lines to every rank, the rest to the last.
      const std::int64_t share = ceil_div(ceil_div(length, size_), kRunElements) * kRunElements;
      const std::int64_t from = std::min(length, share * reader);
      return {chunk + from, std::min(length, from + share) - from, from};
    }
    case Op::kReduceScatter:
    case Op::kAllToAll: {
      Piece piece{prefix(counts, reader) + begin, slice_run(counts, reader, step), 0};
      for (int other = 0; other < reader; ++other) {
        piece.in_step += other == source ? 0 : slice_run(counts, other, step);
      }
      return piece;
    }
    case Op::kBarrier:
      return {};
  }
  return {};
}

Piece Cut::whole(const std::int64_t* counts, int source, int reader) const {
  switch (op_) {
    case Op::kAllGather:
      return {0, counts[source], 0};
    case Op::kReduceScatter:
    case Op::kAllToAll:
      return {prefix(counts, reader), counts[reader], 0};
    default:
      return {0, numel_, 0};
  }
}

}  // namespace hypershard::comm::internal
