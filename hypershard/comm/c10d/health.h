// Who is alive, who fell behind and who failed first: so that a collective that cannot complete
// says which rank is to blame instead of "connection closed" or nothing at all.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "hypershard/comm/communicator.h"

namespace c10d {
class Store;
}  // namespace c10d

namespace hypershard::comm {

namespace internal {
struct HealthState;
}  // namespace internal

/// A collective as health messages name it.
struct CollectiveNote {
  std::string communicator = {};  ///< empty: none yet
  std::string op = {};
  std::string unit = {};
  std::uint64_t sequence = 0;
  /// Differs if two ranks call different things under one sequence number.
  std::uint64_t signature = 0;
  std::string detail = {};  ///< dtype and size, e.g. `float32, 4096 bytes`
  bool crosses_supernodes = false;
};
/// Writes e.g. `reduce_scatter #17 of unit 'blocks.3' on axis 'replicate' between supernodes`.
std::string to_text(const CollectiveNote& note);

/// How often a rank shows that it lives, and how long silence is borne.
struct HealthOptions {
  int rank = 0;
  int world_size = 1;
  double heartbeat_s = 0;  ///< 0: HS_HEARTBEAT_MS
  /// Who hosts the store, e.g. `rank 0 (which hosts the job's store)`.
  std::string store_owner = {};
};

/// What a rank knows about a collective that does not complete.
struct Stall {
  CollectiveNote note;
  std::string transport_text = {};  ///< what the back end said, empty if it said nothing
  bool timed_out = false;
  double waited_s = 0;
  std::optional<int> awaited_rank = std::nullopt;  ///< global rank whose message is missing
};

/// A small thread that publishes this rank's heartbeat and last collective in the job's store, and
/// reads the others' once somebody asks.
///
/// Life cycle: made on all ranks; then note() with every collective; at the end leave(), or
/// report_failure(). Without either, peers see this rank fall silent.
/// The store may hang (its host stopped): only the thread talks to it, no other method blocks
/// longer than explain() and report_failure() say. A thread that hangs in the store is left behind.
/// Threads: any.
class Health {
 public:
  /// Publishes the first heartbeat. `store` must be a connection of its own.
  /// Errors: the store's own, if it does not take it.
  Health(c10::intrusive_ptr<::c10d::Store> store, const HealthOptions& options);
  ~Health();
  Health(const Health&) = delete;
  Health& operator=(const Health&) = delete;

  double heartbeat_s() const;

  /// Records the collective this rank has started; peers see it with the next heartbeat.
  void note(CollectiveNote note);

  /// While alive, the heartbeats of these ranks are read.
  class Watch {
   public:
    Watch(Health* health, std::vector<int> ranks);
    ~Watch();
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

   private:
    Health* health_;
    int id_;
  };

  /// Returns why `stall` can never complete, if that is known already; never blocks. Needs a Watch.
  std::optional<std::string> verdict(const GroupInfo& group, const Stall& stall) const;

  /// Finds out why `stall` does not complete and says it in one sentence; blocks for at most three
  /// heartbeats while it looks.
  std::string explain(const GroupInfo& group, const Stall& stall);

  /// Tells the peers that this rank fails and why; only the first failure of the job is kept.
  /// Blocks for at most two heartbeats.
  void report_failure(std::string_view text);

  /// Waits until every rank has called this: the barrier before the end of the job.
  /// Errors: CommError naming who died, failed or is still at work after `timeout_s`.
  void finish(double timeout_s);

  /// Tells the peers that this rank will not touch the store again and stops the thread.
  void leave();

  /// Waits until all other ranks have left, failed or fallen silent, for at most `seconds`: the
  /// host of the store stays while others may still want to read why it ends.
  void linger(double seconds);

 private:
  std::shared_ptr<internal::HealthState> state_;
};

}  // namespace hypershard::comm
