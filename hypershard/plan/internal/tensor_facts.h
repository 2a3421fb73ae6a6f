// Small questions about tensors that the tracker asks of each one it meets.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

namespace hypershard::plan::internal {

/// Counts in-place writes to the tensor's memory, by any tensor that shares it; -1 if nobody
/// counts.
inline std::int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? -1 : static_cast<std::int64_t>(tensor._version());
}

inline const void* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

/// Tells whether the tensor is a number of the program that an operator took as a tensor.
inline bool is_wrapped_number(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

inline bool can_have_gradient(const at::Tensor& tensor) {
  return at::isFloatingType(tensor.scalar_type()) || at::isComplexType(tensor.scalar_type());
}

}  // namespace hypershard::plan::internal
