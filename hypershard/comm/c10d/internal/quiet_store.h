// Keeps c10d from logging stack traces about a store that we handle: a store that dies is an
// ordinary event here, reported once, in our words.
#pragma once

namespace hypershard::comm::internal {

/// Raises libtorch's log threshold to errors while at least one object is alive; does nothing if
/// the user has set TORCH_CPP_LOG_LEVEL. Warnings of other threads are lost meanwhile: keep it
/// around calls to the store only.
class QuietStore {
 public:
  QuietStore();
  ~QuietStore();
  QuietStore(const QuietStore&) = delete;
  QuietStore& operator=(const QuietStore&) = delete;
};

}  // namespace hypershard::comm::internal
