// Why: one thread a rank runs all its delayed collectives, and one generator decides which of them
// completes next.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/comm/communicator.h"
#include "hypershard/core/error_context.h"

namespace hypershard::comm::internal {

/// A stretch of the caller's memory that must not change while a work is in flight.
struct FrozenBytes {
  const std::byte* now;
  const std::byte* before;  ///< the copy taken at the call
  std::int64_t bytes;
};

/// A stretch of the caller's memory that a result goes to once the work is complete.
struct DelayedResult {
  std::byte* output;        ///< the caller's
  const std::byte* result;  ///< where the inner collective leaves it
  std::int64_t bytes;
};

/// One delayed collective. The caller's thread makes it; afterwards the hub's mutex guards it.
struct DelayedItem {
  std::string text;                 ///< for messages
  std::function<WorkPtr()> launch;  ///< starts the inner collective
  std::vector<at::Tensor> held;     ///< keeps alive what the pointers below point to
  std::vector<DelayedResult> results;
  std::vector<FrozenBytes> frozen;
  double timeout_s = 0;
  int tests_to_fail = 0;

  WorkPtr work;
  bool inner_done = false;
  bool asked = false;  ///< the caller wants it complete
  bool complete = false;
  std::int64_t asked_ns = 0;
  std::exception_ptr error;
};

/// The works of one communicator, oldest first, until they are complete.
struct DelayedLane {
  std::deque<std::shared_ptr<DelayedItem>> items;
};

/// Runs and completes the delayed works of one rank.
///
/// Threads: all methods by the rank's own thread; a thread of the hub does the rest.
class DelayedHub {
 public:
  explicit DelayedHub(std::uint64_t seed);
  ~DelayedHub();
  DelayedHub(const DelayedHub&) = delete;
  DelayedHub& operator=(const DelayedHub&) = delete;

  std::shared_ptr<DelayedLane> add_lane();
  void post(DelayedLane& lane, std::shared_ptr<DelayedItem> item);
  /// Completes works in random order until `item` is complete; passes over one that no peer starts
  /// while `item` could be complete.
  void wait(DelayedLane& lane, DelayedItem& item);
  bool test(DelayedLane& lane, DelayedItem& item);

 private:
  void run();
  bool launch_new(std::unique_lock<std::mutex>& lock);
  bool poll_inner(std::unique_lock<std::mutex>& lock);
  bool complete_asked(std::unique_lock<std::mutex>& lock);
  std::shared_ptr<DelayedItem> oldest(DelayedLane& lane);
  void ask(DelayedItem& item);
  void complete(DelayedItem& item, std::unique_lock<std::mutex>& lock);
  void complete_unless_stuck(
      DelayedItem& picked, const DelayedItem& awaited, std::unique_lock<std::mutex>& lock
  );

  const ErrorRank error_rank_;
  std::mutex mutex_;
  std::condition_variable for_worker_;
  std::condition_variable for_caller_;
  std::mt19937_64 order_;
  std::mt19937_64 patience_;
  std::mt19937_64 lateness_;  ///< used by the hub's thread only
  std::vector<std::weak_ptr<DelayedLane>> lanes_;
  std::deque<std::shared_ptr<DelayedItem>> unlaunched_;
  std::vector<std::shared_ptr<DelayedItem>> in_flight_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace hypershard::comm::internal
