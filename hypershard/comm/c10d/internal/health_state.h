// What a rank knows about the others, and the thread that keeps it fresh; the inside of Health.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "hypershard/comm/c10d/health.h"

namespace c10d {
class Store;
}  // namespace c10d

namespace hypershard::comm::internal {

/// In the order of a rank's life; from kLeft on it is no longer there.
enum class HealthStatus { kAlive, kFinished, kLeft, kFailed };

/// What a rank publishes.
struct HealthRecord {
  std::uint64_t counter = 0;
  HealthStatus status = HealthStatus::kAlive;
  CollectiveNote note;
};

/// What is known of another rank.
struct HealthPeer {
  HealthRecord record;
  bool is_seen = false;
  double changed_s = 0;  ///< when its counter was last seen to move
};

struct FirstFailure {
  int rank = -1;
  std::string text;
};

/// Shared by Health and its thread, so that a thread which hangs in the store can be left behind.
///
/// The store holds one record a rank under `health/<rank>`, the first failure under
/// `health/failure`, and how many ranks have finished and left. Threads: `mutex` guards everything;
/// methods expect it to be held, and `round` lets go of it meanwhile.
struct HealthState {
  HealthState(c10::intrusive_ptr<::c10d::Store> health_store, const HealthOptions& health_options);

  c10::intrusive_ptr<::c10d::Store> store;
  HealthOptions options;

  mutable std::mutex mutex;
  std::condition_variable wake;     // for the thread: something is asked of it
  std::condition_variable changed;  // for others: a round has ended
  HealthRecord own;
  std::string own_failure;  // to be written as the job's first failure, if none is there
  std::map<int, std::vector<int>> watches;
  int next_watch = 0;
  std::map<int, HealthPeer> peers;
  std::optional<FirstFailure> first_failure;
  std::int64_t num_finished = 0;
  std::int64_t num_left = 0;
  bool is_finished_counted = false;
  bool is_left_counted = false;
  std::string store_error;
  bool is_stopping = false;
  bool has_request = false;
  bool has_ended = false;
  bool in_round = false;
  double round_start_s = 0;
  double last_read_s = 0;
  std::uint64_t num_rounds = 0;  // completed
  std::thread thread;

  // health_state.cpp

  /// The thread's body.
  void run();
  /// One exchange with the store, which may hang.
  void round(std::unique_lock<std::mutex>& lock);
  /// Creates the keys that readers expect, without undoing what came first.
  void create_keys();
  /// Has the thread do a round now and waits for the end of one that began after the call.
  void request(std::unique_lock<std::mutex>& lock, double seconds);
  bool store_hangs() const;

  // health_diagnosis.cpp

  /// Returns those of `ranks` that are silent, the most silent first.
  std::vector<int> silent_ranks(const std::vector<int>& ranks, const Stall& stall) const;
  /// Says who failed, died, left or is elsewhere; nothing while nobody is known to.
  std::optional<std::string> cause(const GroupInfo& group, const Stall& stall) const;
  /// Tells whether a peer stands in a collective of the same number that is not the same.
  std::optional<std::string> mismatch(const GroupInfo& group, const Stall& stall) const;
  /// Says who is behind when all are alive.
  std::string lag_text(const GroupInfo& group, const Stall& stall) const;
  /// Returns how many of the other ranks have left, failed or fallen silent.
  int num_others_gone() const;
  /// What is to be said after looking as long as that helps.
  std::string conclusion(const GroupInfo& group, const Stall& stall) const;

 private:
  std::vector<int> ranks_to_read() const;
  void take(const std::vector<int>& ranks, const std::vector<std::vector<std::uint8_t>>& values);
  std::string silent_text(const std::vector<int>& silent, const Stall& stall) const;
};

}  // namespace hypershard::comm::internal
