// Why: see futex.h. glibc has no wrapper for the system call.
// The words may be in memory of several processes, so the private variants are not used.
#include "hypershard/comm/shm/internal/futex.h"

#include <climits>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace hypershard::comm::internal {

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, std::int64_t timeout_ns) {
  constexpr std::int64_t kSecond = 1'000'000'000;
  timespec timeout{};
  timeout.tv_sec = timeout_ns / kSecond;
  timeout.tv_nsec = timeout_ns % kSecond;
  // Wake-ups, changed words and time-outs are all the same to callers, who look again.
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

void futex_wake_all(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace hypershard::comm::internal
