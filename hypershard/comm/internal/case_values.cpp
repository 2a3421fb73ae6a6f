// Why: see case_values.h. Values are small integers, exact in every dtype: the element at index i
// of rank r is (3 i + 5 r) mod 13, bool takes its parity.
#include "hypershard/comm/internal/case_values.h"

#include <numeric>

#include <ATen/Functions.h>

#include "hypershard/comm/internal/dtype_text.h"
#include "hypershard/core/error.h"

namespace hypershard::comm::testing_cases {

at::Tensor filled(std::int64_t numel, int rank, at::ScalarType dtype) {
  at::Tensor row = at::arange(numel, at::kLong).mul_(3).add_(5 * rank).remainder_(13);
  return dtype == at::kBool ? row.remainder_(2).to(dtype) : row.to(dtype);
}

at::Tensor garbage(std::int64_t numel, at::ScalarType dtype) {
  return at::full({numel}, dtype == at::kBool ? 1 : 99, at::TensorOptions(dtype));
}

void expect_equal(
    const Communicator& communicator,
    const std::string& what,
    const at::Tensor& got,
    const at::Tensor& expected
) {
  HS_ASSERT(got.numel() == expected.numel(), what, ": ", got.numel(), " elements");
  if (at::equal(got, expected.to(got.scalar_type()))) {
    return;
  }
  const at::Tensor wide = got.to(at::kDouble);
  const at::Tensor right = expected.to(at::kDouble);
  const auto at = wide.ne(right).to(at::kLong).argmax().item<std::int64_t>();
  HS_ASSERT(
      false,
      what,
      " on rank ",
      communicator.rank(),
      " of ",
      communicator.size(),
      " over ",
      communicator.backend(),
      " (",
      internal::dtype_text(got.scalar_type()),
      "): element ",
      at,
      " of ",
      got.numel(),
      " is ",
      wide[at].item<double>(),
      " (expected ",
      right[at].item<double>(),
      ")"
  );
}

std::int64_t total(const Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

std::int64_t begin_of(const Counts& counts, int rank) {
  return std::accumulate(counts.begin(), counts.begin() + rank, std::int64_t{0});
}

std::size_t index(int rank) {
  return static_cast<std::size_t>(rank);
}

at::Tensor joined(int size, std::int64_t begin, std::int64_t numel, ReduceOp op) {
  at::Tensor result;
  for (int rank = 0; rank < size; ++rank) {
    const at::Tensor row = filled(begin + numel, rank, at::kDouble).narrow(0, begin, numel);
    if (!result.defined()) {
      result = row.clone();
    } else if (op == ReduceOp::kSum) {
      result.add_(row);
    } else {
      result = op == ReduceOp::kMax ? at::maximum(result, row) : at::minimum(result, row);
    }
  }
  return result;
}

std::vector<Counts> count_cases(int size) {
  Counts even(index(size), 64);
  Counts uneven;
  Counts with_zero;
  for (int rank = 0; rank < size; ++rank) {
    uneven.push_back(17 + 40 * rank);
    with_zero.push_back(rank % 2 == 0 ? 0 : 129);
  }
  return {even, uneven, with_zero, Counts(index(size), 0)};
}

}  // namespace hypershard::comm::testing_cases
