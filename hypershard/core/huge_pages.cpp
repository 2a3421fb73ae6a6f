// See huge_pages.h.
#include "hypershard/core/huge_pages.h"

#include <cstddef>
#include <sys/mman.h>
#include <unistd.h>

namespace hypershard {

void advise_huge_pages(void* data, std::int64_t bytes) noexcept {
  if (bytes < kHugePageBytes) {
    return;
  }
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t skipped = (page - reinterpret_cast<std::uintptr_t>(data) % page) % page;
  const std::size_t inside = (static_cast<std::size_t>(bytes) - skipped) / page * page;
  // Refused by a kernel without huge pages: small ones are right as well.
  static_cast<void>(::madvise(static_cast<std::byte*>(data) + skipped, inside, MADV_HUGEPAGE));
}

}  // namespace hypershard
