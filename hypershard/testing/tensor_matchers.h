// Why: a failed comparison of tensors must say where and by how much, not only that.
// The macros need <gtest/gtest.h> where they are used.
#pragma once

#include <string>

#include <ATen/core/Tensor.h>

namespace hypershard::testing {

/// How far two values may lie apart: |actual - expected| <= absolute + relative * |expected|.
struct Tolerance {
  double relative = 0;
  double absolute = 0;
};

/// Returns "" if both tensors have the same dtype, sizes and bits, else what differs: how many
/// elements, the worst one, the largest absolute and relative errors. NaNs of equal bits are equal.
std::string tensor_difference(const at::Tensor& actual, const at::Tensor& expected);

/// Returns "" if the sizes are equal and every element is within the tolerance (NaN only matches
/// NaN), else what differs and the share of the tolerance used.
std::string tensor_difference(
    const at::Tensor& actual, const at::Tensor& expected, const Tolerance& tolerance
);

}  // namespace hypershard::testing

#define HS_INTERNAL_EXPECT_NO_DIFFERENCE(a, b, ...)                                   \
  do {                                                                                \
    const ::std::string hs_difference =                                               \
        ::hypershard::testing::tensor_difference((a), (b)__VA_OPT__(, ) __VA_ARGS__); \
    if (!hs_difference.empty()) {                                                     \
      ADD_FAILURE() << #a " is not " #b ": " << hs_difference;                        \
    }                                                                                 \
  } while (false)

/// Expects equal dtype, sizes and bits.
#define EXPECT_TENSORS_EQUAL(actual, expected) HS_INTERNAL_EXPECT_NO_DIFFERENCE(actual, expected)
/// Expects equal sizes and values within `relative` and `absolute`.
#define EXPECT_TENSORS_CLOSE(actual, expected, relative, absolute)                 \
  HS_INTERNAL_EXPECT_NO_DIFFERENCE(                                                \
      actual, expected, (::hypershard::testing::Tolerance{(relative), (absolute)}) \
  )
