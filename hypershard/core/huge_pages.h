// Why: a buffer that lives as long as a run costs a page fault, and a place in the table of pages
// whenever it is read, for every 4 KiB, unless the kernel is asked for larger pages.
#pragma once

#include <cstdint>

namespace hypershard {

/// Size of a huge page, and of the smallest buffer for which one is asked.
inline constexpr std::int64_t kHugePageBytes = std::int64_t{2} << 20;

/// Asks the kernel to back `bytes` at `data` with huge pages, as far as whole pages lie inside.
///
/// For memory that is kept: the advice stays with the addresses. Before the memory is first
/// touched, or it comes in small pages that the kernel may join later. Advice only: what a host
/// cannot or may not do is left as it is, and less than kHugePageBytes is left alone. Threads: any.
void advise_huge_pages(void* data, std::int64_t bytes) noexcept;

}  // namespace hypershard
