// Why: ranks sleep and wake through words in shared memory; the kernel's futex is the one primitive
// that works between processes without a file or a server.
#pragma once

#include <atomic>
#include <cstdint>

namespace hypershard::comm::internal {

/// Sleeps while `word` holds `expected`, at most `timeout_ns`; may wake for no reason.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, std::int64_t timeout_ns);

/// Wakes all that sleep on `word`, in every process that maps it.
void futex_wake_all(std::atomic<std::uint32_t>& word);

}  // namespace hypershard::comm::internal
