// Why: durations are measured with one clock that never jumps; wall time is for log lines only.
// On Linux this is CLOCK_MONOTONIC, equal in all processes of a host, so traces of ranks line up.
#pragma once

#include <cstdint>
#include <time.h>

namespace hypershard {

/// Returns nanoseconds since an arbitrary start that all processes of the host share.
inline std::int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

/// Returns the same in seconds.
inline double now_s() {
  return static_cast<double>(now_ns()) * 1e-9;
}

/// Returns how far wall time is ahead of `now_ns()`: aligns the clocks of several hosts.
inline std::int64_t wall_minus_monotonic_ns() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec - now_ns();
}

/// Measures the time since its construction or last restart.
class Stopwatch {
 public:
  std::int64_t elapsed_ns() const { return now_ns() - start_ns_; }
  double elapsed_s() const { return static_cast<double>(elapsed_ns()) * 1e-9; }
  double elapsed_ms() const { return static_cast<double>(elapsed_ns()) * 1e-6; }
  void restart() { start_ns_ = now_ns(); }

 private:
  std::int64_t start_ns_ = now_ns();
};

}  // namespace hypershard
