// From tensors to the fused CPU kernels: which element types they take, and how rows are split over
// threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include "hypershard/nn/internal/element.h"

namespace hypershard::nn::internal {

/// Elements that a thread should have at least.
inline constexpr std::int64_t kGrain = 16384;

inline bool is_kernel_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16;
}

/// The dtype in which kernels add up and keep statistics of `dtype`.
inline at::ScalarType compute_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

template <class T>
const T* data_of(const at::Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <class T>
T* mutable_data_of(const at::Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

/// Calls `body(T{})` with the element type of a kernel dtype.
template <class Body>
void with_element_type(at::ScalarType dtype, const Body& body) {
  switch (dtype) {
    case at::kDouble:
      return body(double{});
    case at::kBFloat16:
      return body(Bf16{});
    default:
      return body(float{});
  }
}

/// Calls `body(begin, end)` for runs of rows of `row_elements` elements each, in parallel where
/// there is enough work.
template <class Body>
void for_rows(std::int64_t rows, std::int64_t row_elements, const Body& body) {
  at::parallel_for(
      0, rows, std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, row_elements)), body
  );
}

}  // namespace hypershard::nn::internal
