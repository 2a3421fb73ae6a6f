// See cut_parameters.h.
#include "hypershard/plan/internal/cut_parameters.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <c10/util/intrusive_ptr.h>

namespace hypershard::plan::internal {
namespace {

constexpr std::size_t kFirstSweep = 256;

struct Table {
  struct Entry {
    c10::weak_intrusive_ptr<at::TensorImpl> parameter;  // keeps the address from being used again
    std::vector<std::int64_t> sizes;
  };
  std::mutex mutex;
  std::unordered_map<const at::TensorImpl*, Entry> entries;
  std::size_t sweep_at = kFirstSweep;
};

// Never destroyed: parameters with static lifetime may outlive any order of destruction.
Table& table() {
  static auto* instance = new Table;
  return *instance;
}

}  // namespace

void note_cut(const at::Tensor& parameter) {
  Table& all = table();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.entries.insert_or_assign(
      parameter.unsafeGetTensorImpl(),
      Table::Entry{
          c10::weak_intrusive_ptr<at::TensorImpl>(parameter.getIntrusivePtr()),
          parameter.sizes().vec()
      }
  );
  if (all.entries.size() >= all.sweep_at) {
    std::erase_if(all.entries, [](const auto& item) { return item.second.parameter.expired(); });
    all.sweep_at = std::max(kFirstSweep, 2 * all.entries.size());
  }
}

bool is_part(const at::Tensor& parameter) {
  Table& all = table();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.entries.find(parameter.unsafeGetTensorImpl());
  return found != all.entries.end() && parameter.sizes() == at::IntArrayRef(found->second.sizes);
}

}  // namespace hypershard::plan::internal
