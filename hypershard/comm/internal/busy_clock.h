// Why: how long a communicator had anything in flight is what a tier's bandwidth is divided by.
#pragma once

#include <cstdint>

#include "hypershard/core/clock.h"

namespace hypershard::comm::internal {

/// Adds up the time during which at least one collective is in flight. Threads: not thread-safe.
class BusyClock {
 public:
  void begin() {
    if (num_in_flight_++ == 0) {
      since_ns_ = now_ns();
    }
  }
  void end() {
    if (--num_in_flight_ == 0) {
      total_ns_ += now_ns() - since_ns_;
    }
  }
  /// Returns the time up to now.
  std::int64_t busy_ns() const {
    return total_ns_ + (num_in_flight_ > 0 ? now_ns() - since_ns_ : 0);
  }

 private:
  int num_in_flight_ = 0;
  std::int64_t since_ns_ = 0;
  std::int64_t total_ns_ = 0;
};

}  // namespace hypershard::comm::internal
