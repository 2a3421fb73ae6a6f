// Why: what a rank costs in memory, as the kernel counts it.
#pragma once

#include <cstdint>

namespace hypershard::train {

/// Returns the most memory that was resident in this process at once (VmHWM); 0 if the kernel does
/// not say. Pages shared with other ranks count in full in each of them.
std::int64_t peak_resident_bytes();

/// Returns the memory that is resident in this process now (VmRSS); 0 if the kernel does not say.
std::int64_t resident_bytes();

/// Returns this process's share of the memory that is resident now (PSS): a page that n processes
/// map counts as 1/n, so that the ranks' values add up to what the job uses. 0 if unknown. Costs
/// milliseconds: the kernel walks all pages.
std::int64_t proportional_bytes();

/// Returns the host's memory; 0 if unknown.
std::int64_t total_memory_bytes();

/// Makes malloc keep freed memory instead of giving it back to the kernel and fetching it again,
/// which costs a page fault for every 4 KiB of every large tensor. Threads: before others start.
void keep_freed_memory();

}  // namespace hypershard::train
