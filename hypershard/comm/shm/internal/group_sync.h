// Why: waiting is where distributed programs hang, so every wait over shared memory goes through
// one function that notices progress, death, departure, failure elsewhere and the time-out.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include "hypershard/comm/communicator.h"
#include "hypershard/comm/internal/idle_work.h"
#include "hypershard/comm/shm/internal/control_block.h"
#include "hypershard/comm/shm/internal/region_source.h"

namespace hypershard::comm::internal {

/// Result of one attempt to get on.
enum class Advance {
  kDone,
  kMoved,  ///< something was done; worth another attempt at once
  kStuck,  ///< nothing to do before a rank named in the Lag gets on
};

/// The ranks that an attempt found behind.
class Lag {
 public:
  void clear();
  void add(int rank);
  bool has(int rank) const;
  /// Returns one bit a rank, modulo 64.
  std::uint64_t mask() const { return mask_; }
  const c10::SmallVector<int, 8>& ranks() const { return ranks_; }

 private:
  std::uint64_t mask_ = 0;
  c10::SmallVector<int, 8> ranks_;
};

/// How a wait is told in an error.
struct WaitText {
  std::function<std::string()> during;           ///< `all_gather #3 for unit 'x' on 'shard'`
  std::function<std::string(int rank)> missing;  ///< `has not joined all_gather #3 …`
};

/// Makes the texts when they are needed, which is hardly ever; it lives as long as the wait.
using MakeWaitText = c10::function_ref<WaitText()>;

/// Writes a failure into a group's memory, unless there is one already, and wakes its ranks.
/// Threads: any that maps the block.
void record_failure(const ControlBlock& block, int rank, std::string_view text);

/// One rank's access to the control block of its group.
///
/// Threads: the rank's own.
class GroupSync {
 public:
  /// Collective: allocates the control block. Errors: as RegionSource::allocate.
  GroupSync(GroupInfo info, std::shared_ptr<RegionSource> source);

  const GroupInfo& info() const { return info_; }
  int rank() const { return info_.rank; }
  int size() const { return block_.size(); }
  const ControlBlock& block() const { return block_; }
  RegionSource& source() const { return *source_; }
  CommStats& stats() { return stats_; }

  /// Raises one of this rank's counters and wakes the peers that wait for this rank.
  void publish(std::atomic<std::uint64_t>& counter, std::uint64_t value);
  /// Wakes the peers that wait for this rank.
  void ring();
  /// Tells the peers that this rank will do nothing more.
  void leave() noexcept;

  /// Names the worker whose waits these are, so that they work all others of the thread.
  void set_worker(const IdleWorker* worker) { worker_ = worker; }

  /// Throws the group's failure if there is one. Errors: CommError.
  void check() const;
  /// Makes `text` the failure of all ranks and throws it. Errors: CommError, always.
  [[noreturn]] void fail(const std::string& text);

  /// Repeats `advance` until it is done, sleeping while it and all else that this thread has open
  /// are stuck.
  /// Errors: CommError if a rank that is waited for has died, left or not moved within the
  /// time-out, or if the group has failed elsewhere; whatever `advance` throws.
  void wait_until(const std::function<Advance(Lag&)>& advance, MakeWaitText text);

  /// Looks after the peers between waits, now and then; for callers that poll.
  /// Errors: as wait_until, without the time-out.
  void glance(const std::function<Advance(Lag&)>& advance, MakeWaitText text);

  /// Names a rank for messages: `rank 1 (global 3)`.
  std::string rank_text(int rank) const;
  /// Describes the newest call of a rank: `its last collective was all_gather #16 (unit 'x')`.
  std::string last_call_text(int rank) const;

 private:
  class Sleep;
  bool check_left(const std::function<Advance(Lag&)>& advance, MakeWaitText text);
  void check_lost(const std::function<Advance(Lag&)>& advance, MakeWaitText text);
  void check_time(
      const std::function<Advance(Lag&)>& advance,
      MakeWaitText text,
      const std::function<std::string()>& why
  );
  void fail_if_still_stuck(
      const std::function<Advance(Lag&)>& advance, const std::function<std::string()>& failure
  );

  GroupInfo info_;
  std::shared_ptr<RegionSource> source_;
  std::shared_ptr<SharedBuffer> control_;
  ControlBlock block_;
  Lag lag_;
  const IdleWorker* worker_ = nullptr;
  bool spins_ = false;
  std::int64_t next_glance_ns_ = 0;
  CommStats stats_;
};

/// Names a call for messages: `all_gather #16 for unit 'blocks.2' on 'shard'`.
std::string call_text(const CallRecord& record, std::string_view communicator);

}  // namespace hypershard::comm::internal
