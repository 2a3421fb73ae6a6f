// The element types of the fused CPU kernels, for the code on both sides: torch's and the kernels'.
#pragma once

#include <cstdint>
#include <type_traits>

namespace hypershard::nn::internal {

/// A bfloat16 as memory holds it.
struct Bf16 {
  std::uint16_t bits;
};

/// The type that a kernel computes in, given what memory holds.
template <class T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

}  // namespace hypershard::nn::internal
