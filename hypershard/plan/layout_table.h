// Layouts kept beside plain tensors, and forgotten with them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include "hypershard/layout/tensor_spec.h"

namespace hypershard::plan {

/// What is known of one tensor.
struct TableEntry {
  layout::TensorSpec spec = {};
  std::string name = {};  ///< of given tensors: parameters and inputs
  /// Fresh memory that no operator wrote to yet. NOTE [unseen kernels]: who fills it through its
  /// address does so behind the tracker's back, and what it holds has no known layout.
  bool is_unwritten = false;
  /// Computed from nothing whose layout was given, as tensors of a data pipeline are.
  bool is_assumed = false;
  std::uint64_t epoch = 0;    ///< of the tape that `value` belongs to
  int value = -1;             ///< on that tape
  std::int64_t version = -1;  ///< of the tensor's memory when `value` was made; -1: not counted
};

/// Side table from tensors to entries.
///
/// Keyed by TensorImpl, so that every handle of a tensor finds its entry and views have entries of
/// their own. An entry's weak reference keeps the address from being used again, so a live tensor
/// that finds its own address has found its own entry. Entries of dead tensors keep a few bytes
/// until the next sweep, which comes as the table grows. Threads: not thread-safe.
class LayoutTable {
 public:
  /// Sets the entry of a defined tensor and returns it. The reference is valid until the next set.
  TableEntry& set(const at::Tensor& tensor, TableEntry entry);
  /// Returns the entry or null.
  TableEntry* find(const at::Tensor& tensor);
  /// Drops what belongs to dead tensors.
  void sweep();
  /// Counts entries, dead ones that were not yet swept included.
  std::size_t size() const { return entries_.size(); }

 private:
  struct Slot {
    c10::weak_intrusive_ptr<at::TensorImpl> tensor;
    TableEntry entry;
  };
  static constexpr std::size_t kFirstSweep = 256;

  std::unordered_map<const at::TensorImpl*, Slot> entries_;
  std::size_t sweep_at_ = kFirstSweep;
};

}  // namespace hypershard::plan
