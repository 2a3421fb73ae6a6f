// See layout_table.h.
#include "hypershard/plan/layout_table.h"

#include <algorithm>
#include <utility>

namespace hypershard::plan {

TableEntry& LayoutTable::set(const at::Tensor& tensor, TableEntry entry) {
  if (entries_.size() >= sweep_at_) {
    sweep();
    sweep_at_ = std::max(kFirstSweep, 2 * entries_.size());
  }
  const at::TensorImpl* key = tensor.unsafeGetTensorImpl();
  const auto found = entries_.find(key);
  if (found != entries_.end()) {
    found->second.entry = std::move(entry);
    return found->second.entry;
  }
  Slot slot{c10::weak_intrusive_ptr<at::TensorImpl>(tensor.getIntrusivePtr()), std::move(entry)};
  return entries_.emplace(key, std::move(slot)).first->second.entry;
}

TableEntry* LayoutTable::find(const at::Tensor& tensor) {
  const auto found = entries_.find(tensor.unsafeGetTensorImpl());
  return found == entries_.end() ? nullptr : &found->second.entry;
}

void LayoutTable::sweep() {
  std::erase_if(entries_, [](const auto& item) { return item.second.tensor.expired(); });
}

}  // namespace hypershard::plan
