// Side tables from parameters to what somebody attached to them, such as a gradient slot.
// An entry's weak reference keeps the address of its TensorImpl from being used again, so a live
// tensor that finds its own address in the table has found its own entry: a lookup needs no
// validation.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

namespace hypershard::nn::internal {

/// Maps parameters to weak references (`WeakRef`: has expired() and lock()). Owns neither side: an
/// entry is forgotten when the parameter or what it refers to dies. Threads: any.
template <class WeakRef>
class ParameterTable {
 public:
  using Ref = decltype(std::declval<const WeakRef&>().lock());

  /// Attaches `ref` to a defined tensor in the place of an earlier one; null detaches.
  void set(const at::Tensor& param, const Ref& ref) {
    const std::unique_lock lock(mutex_);
    at::TensorImpl* key = param.unsafeGetTensorImpl();
    if (ref == nullptr) {
      entries_.erase(key);
    } else {
      entries_.insert_or_assign(
          key, Entry{c10::weak_intrusive_ptr<at::TensorImpl>(param.getIntrusivePtr()), WeakRef(ref)}
      );
      if (entries_.size() >= sweep_at_) {
        std::erase_if(entries_, [](const auto& item) { return item.second.is_dead(); });
        sweep_at_ = std::max(kFirstSweep, 2 * entries_.size());
      }
    }
    size_.store(entries_.size(), std::memory_order_release);
  }

  /// Returns what is attached, or null. Costs an atomic load while the table is empty.
  Ref find(const at::Tensor& param) const {
    if (size() == 0) {
      return {};
    }
    const std::shared_lock lock(mutex_);
    const auto found = entries_.find(param.unsafeGetTensorImpl());
    return found == entries_.end() ? Ref{} : found->second.ref.lock();
  }

  /// Counts entries, dead ones that were not yet swept included.
  std::size_t size() const { return size_.load(std::memory_order_acquire); }

 private:
  struct Entry {
    c10::weak_intrusive_ptr<at::TensorImpl> param;
    WeakRef ref;

    bool is_dead() const { return param.expired() || ref.expired(); }
  };
  static constexpr std::size_t kFirstSweep = 64;

  mutable std::shared_mutex mutex_;
  std::unordered_map<const at::TensorImpl*, Entry> entries_;
  std::size_t sweep_at_ = kFirstSweep;
  std::atomic<std::size_t> size_ = 0;
};

}  // namespace hypershard::nn::internal
