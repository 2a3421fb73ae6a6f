// The table from parameters to gradient slots.
// An entry's weak reference keeps the address of its TensorImpl from being used again, so a live
// tensor that finds its own address in the table has found its own entry: a lookup needs no
// validation.
#include "hypershard/nn/gradient_slot.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/intrusive_ptr.h>

#include "hypershard/core/error.h"

namespace hypershard::nn {
namespace {

struct Entry {
  c10::weak_intrusive_ptr<at::TensorImpl> param;
  std::weak_ptr<GradientSlot> slot;

  bool is_dead() const { return param.expired() || slot.expired(); }
};

class SlotTable {
 public:
  void set(const at::Tensor& param, const std::shared_ptr<GradientSlot>& slot) {
    const std::unique_lock lock(mutex_);
    at::TensorImpl* key = param.unsafeGetTensorImpl();
    if (slot == nullptr) {
      entries_.erase(key);
    } else {
      entries_.insert_or_assign(
          key, Entry{c10::weak_intrusive_ptr<at::TensorImpl>(param.getIntrusivePtr()), slot}
      );
      if (entries_.size() >= sweep_at_) {
        std::erase_if(entries_, [](const auto& item) { return item.second.is_dead(); });
        sweep_at_ = std::max(kFirstSweep, 2 * entries_.size());
      }
    }
    size_.store(entries_.size(), std::memory_order_release);
  }

  std::shared_ptr<GradientSlot> find(const at::Tensor& param) const {
    if (size() == 0) {
      return nullptr;
    }
    const std::shared_lock lock(mutex_);
    const auto found = entries_.find(param.unsafeGetTensorImpl());
    return found == entries_.end() ? nullptr : found->second.slot.lock();
  }

  std::size_t size() const { return size_.load(std::memory_order_acquire); }

 private:
  static constexpr std::size_t kFirstSweep = 64;

  mutable std::shared_mutex mutex_;
  std::unordered_map<const at::TensorImpl*, Entry> entries_;
  std::size_t sweep_at_ = kFirstSweep;
  std::atomic<std::size_t> size_ = 0;
};

// Never destroyed: parameters with static lifetime may outlive any order of destruction.
SlotTable& slot_table() {
  static auto* table = new SlotTable;
  return *table;
}

}  // namespace

void set_gradient_slot(const at::Tensor& param, const std::shared_ptr<GradientSlot>& slot) {
  HS_CHECK(param.defined(), "nn.gradient_slot: the parameter is an undefined tensor");
  slot_table().set(param, slot);
}

std::shared_ptr<GradientSlot> slot_of(const at::Tensor& param) {
  return slot_table().find(param);
}

namespace internal {

GradientSlot::Claim claim_slot(const at::Tensor& param) {
  const auto slot = slot_of(param);
  if (slot == nullptr) {
    return {};
  }
  HS_SUPPORTED(
      !at::GradMode::is_enabled(),
      "nn.gradient_slot: backward with create_graph=true can not write the gradient of a parameter "
      "of shape ",
      param.sizes(),
      " into its slot",
      HS_HINT("detach the slots (unshard without the engine) for second derivatives")
  );
  auto claim = slot->claim();
  if (claim.destination.defined()) {
    HS_CHECK(
        claim.destination.sizes() == param.sizes() && claim.destination.is_contiguous(),
        "nn.gradient_slot: the slot's destination does not fit its parameter: shape ",
        claim.destination.sizes(),
        ", strides ",
        claim.destination.strides(),
        " (expected contiguous ",
        param.sizes(),
        ")"
    );
  }
  return claim;
}

std::size_t slot_table_size() {
  return slot_table().size();
}

}  // namespace internal
}  // namespace hypershard::nn
