// Why: sums decide the bits of a training run: rank order, fp32 accumulation, rounding once,
// aliasing and NaN are checked here, for all paths through the loops.
#include "hypershard/comm/internal/ordered_reduce.h"

#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/Functions.h>

#include "hypershard/testing/tensor_matchers.h"

namespace hypershard::comm::internal {
namespace {

std::byte* data(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

at::Tensor reduce(const std::vector<at::Tensor>& rows, at::ScalarType dtype, Reduction op = {}) {
  at::Tensor output = at::full({rows[0].numel()}, 55, at::TensorOptions(dtype));
  std::vector<const std::byte*> inputs;
  for (const at::Tensor& row : rows) {
    inputs.push_back(data(row));
  }
  ordered_reduce(data(output), dtype, inputs, rows[0].scalar_type(), rows[0].numel(), op);
  return output;
}

/// Rows of magnitudes so different that the order of additions shows.
std::vector<at::Tensor> rows_of(int num_rows, std::int64_t numel, at::ScalarType dtype) {
  std::vector<at::Tensor> rows;
  for (int row = 0; row < num_rows; ++row) {
    const double scale[] = {1000, 1, 0.01, 300, 0.3};
    rows.push_back(
        at::arange(numel, at::kDouble).mul_(0.7).add_(row).sin_().mul_(scale[row % 5]).to(dtype)
    );
  }
  return rows;
}

at::Tensor expected_sum(
    const std::vector<at::Tensor>& rows, at::ScalarType accumulate, at::ScalarType dtype
) {
  at::Tensor sum = rows[0].to(accumulate, /*non_blocking=*/false, /*copy=*/true);
  for (std::size_t row = 1; row < rows.size(); ++row) {
    sum.add_(rows[row].to(accumulate));
  }
  return sum.to(dtype);
}

TEST(OrderedReduceTest, SumsInOrderAndRoundsOnce) {
  struct Case {
    at::ScalarType input, accumulate, output;
  };
  const Case cases[] = {
      {at::kFloat, at::kFloat, at::kFloat},
      {at::kFloat, at::kDouble, at::kDouble},
      {at::kDouble, at::kDouble, at::kDouble},
      {at::kBFloat16, at::kFloat, at::kBFloat16},
      {at::kBFloat16, at::kFloat, at::kFloat},
      {at::kBFloat16, at::kDouble, at::kDouble},
      {at::kHalf, at::kFloat, at::kHalf},
      {at::kHalf, at::kFloat, at::kFloat},
      {at::kHalf, at::kDouble, at::kDouble},
  };
  for (const Case& c : cases) {
    for (const int num_rows : {1, 2, 3, 5}) {
      for (const std::int64_t numel : {1, 31, 2048, 5001}) {
        const auto rows = rows_of(num_rows, numel, c.input);
        EXPECT_TENSORS_EQUAL(reduce(rows, c.output), expected_sum(rows, c.accumulate, c.output));
      }
    }
  }
}

TEST(OrderedReduceTest, OutputMayBeAnyOfTheInputs) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const int num_rows : {1, 2, 3, 4}) {
      for (int out = 0; out < num_rows; ++out) {
        const auto rows = rows_of(num_rows, 4999, dtype);
        const at::Tensor expected =
            expected_sum(rows, dtype == at::kDouble ? at::kDouble : at::kFloat, dtype);
        std::vector<const std::byte*> inputs;
        for (const at::Tensor& row : rows) {
          inputs.push_back(data(row));
        }
        const at::Tensor& target = rows[static_cast<std::size_t>(out)];
        ordered_reduce(data(target), dtype, inputs, dtype, 4999, ReduceOp::kSum);
        EXPECT_TENSORS_EQUAL(target, expected);
      }
    }
  }
}

TEST(OrderedReduceTest, DividesTheSumOnceBeforeItIsRounded) {
  struct Case {
    at::ScalarType input, accumulate, output;
  };
  const Case cases[] = {
      {at::kFloat, at::kFloat, at::kFloat},
      {at::kFloat, at::kDouble, at::kDouble},
      {at::kDouble, at::kDouble, at::kDouble},
      {at::kBFloat16, at::kFloat, at::kBFloat16},
      {at::kBFloat16, at::kFloat, at::kFloat},
      {at::kHalf, at::kFloat, at::kHalf},
  };
  for (const Case& c : cases) {
    for (const double divisor : {2.0, 3.0, 0.25, 1e3}) {
      for (const int num_rows : {1, 2, 3}) {
        const auto rows = rows_of(num_rows, 5001, c.input);
        const at::Tensor expected =
            expected_sum(rows, c.accumulate, c.accumulate).div_(divisor).to(c.output);
        EXPECT_TENSORS_EQUAL(reduce(rows, c.output, {ReduceOp::kSum, divisor}), expected);
      }
    }
  }
}

TEST(OrderedReduceTest, MaxAndMinKeepNaN) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const at::Tensor a = at::tensor({1.0, 5.0, nan, 2.0}).to(dtype);
    const at::Tensor b = at::tensor({3.0, -4.0, 1.0, nan}).to(dtype);
    const at::Tensor c = at::tensor({2.0, 0.0, 0.0, 7.0}).to(dtype);
    const at::Tensor largest = reduce({a, b, c}, dtype, ReduceOp::kMax).to(at::kDouble);
    const at::Tensor smallest = reduce({a, b, c}, dtype, ReduceOp::kMin).to(at::kDouble);
    EXPECT_TENSORS_CLOSE(largest, at::tensor({3.0, 5.0, nan, nan}, at::kDouble), 0, 0);
    EXPECT_TENSORS_CLOSE(smallest, at::tensor({1.0, -4.0, nan, nan}, at::kDouble), 0, 0);
  }
}

TEST(OrderedReduceTest, RoundsEveryBf16AsTorchDoes) {
  // Sums of two bf16 values around ties, overflow to infinity, subnormals and NaN.
  const double inf = std::numeric_limits<double>::infinity();
  const at::Tensor a =
      at::tensor({1.0, 1.0, 3.3895e38, 1e-40, inf, inf, -1.0, 257.0}).to(at::kBFloat16);
  const at::Tensor b =
      at::tensor({0.00390625, 0.01171875, 3.3895e38, 1e-40, -inf, 1.0, -0.00390625, 1.0})
          .to(at::kBFloat16);
  const at::Tensor expected = a.to(at::kFloat).add(b.to(at::kFloat)).to(at::kBFloat16);
  EXPECT_TENSORS_CLOSE(reduce({a, b}, at::kBFloat16), expected, 0, 0);
}

// Through the wire dtype, in every shape of the loops: the bits of rounding each input first.
TEST(OrderedReduceTest, CountsInputsAsTheWireDtypeRoundsThem) {
  for (const int num_rows : {1, 2, 5}) {
    for (const std::int64_t numel : {1, 7, 5000}) {
      std::vector<at::Tensor> rows = rows_of(num_rows, numel, at::kFloat);
      rows[0][0] = std::numeric_limits<float>::quiet_NaN();
      rows.back()[numel / 2] = std::numeric_limits<float>::infinity();
      std::vector<at::Tensor> rounded;
      for (const at::Tensor& row : rows) {
        rounded.push_back(row.to(at::kBFloat16));
      }
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
        for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
          const at::Tensor got = reduce(rows, dtype, {op, 3, at::kBFloat16});
          const at::Tensor expected = reduce(rounded, dtype, {op, 3});
          EXPECT_TRUE(at::allclose(got, expected, 0, 0, /*equal_nan=*/true)) << numel;
        }
      }
    }
  }
}

TEST(OrderedReduceTest, RoundsTheResultToo) {
  const std::vector<at::Tensor> rows = rows_of(3, 300, at::kFloat);
  std::vector<const std::byte*> inputs;
  for (const at::Tensor& row : rows) {
    inputs.push_back(data(row));
  }
  const at::Tensor once = reduce(rows, at::kFloat, {ReduceOp::kSum, 1, at::kBFloat16});
  // Into the second input: each block is read before it is written.
  ordered_reduce(
      data(rows[1]), at::kFloat, inputs, at::kFloat, 300, {ReduceOp::kSum, 1, at::kBFloat16}, true
  );
  EXPECT_TRUE(at::equal(rows[1], once.to(at::kBFloat16).to(at::kFloat)));
  const at::Tensor alone = rows_of(1, 300, at::kFloat)[0];
  const at::Tensor as_bf16 = alone.to(at::kBFloat16);
  inputs = {data(alone)};
  ordered_reduce(
      data(alone), at::kFloat, inputs, at::kFloat, 300, {ReduceOp::kSum, 1, at::kBFloat16}, true
  );
  EXPECT_TRUE(at::equal(alone, as_bf16.to(at::kFloat)));
  at::Tensor wire = at::empty({300}, at::kBFloat16);
  round_to_wire(data(wire), data(rows_of(1, 300, at::kFloat)[0]), 300);
  EXPECT_TRUE(at::equal(wire, as_bf16));
}

}  // namespace
}  // namespace hypershard::comm::internal
