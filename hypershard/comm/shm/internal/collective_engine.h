// Why: one algorithm for all collectives over shared memory, whether ranks are threads or
// processes. A rank does its own part inside test() and wait(), in the order of its calls.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include <c10/util/SmallVector.h>

#include "hypershard/comm/arena.h"
#include "hypershard/comm/internal/busy_clock.h"
#include "hypershard/comm/internal/idle_work.h"
#include "hypershard/comm/shm/internal/group_sync.h"
#include "hypershard/comm/shm/internal/shared_call.h"
#include "hypershard/comm/shm/internal/staging_ring.h"

namespace hypershard::comm::internal {

/// A region that collectives may read in place.
struct Region {
  std::uint32_t id;
  std::shared_ptr<SharedBuffer> buffer;
};
using RegionTable = std::vector<Region>;

/// One call of this rank that is not finished, or whose input peers may still read.
struct PendingCall {
  SharedCall call;
  std::uint64_t sequence = 0;
  Cut cut;
  CallRecord* record = nullptr;
  const std::int64_t* counts = nullptr;          ///< this rank's, in the control block
  std::shared_ptr<const RegionTable> regions;    ///< as they were at the call
  c10::SmallVector<const CallRecord*, 8> peers;  ///< null until seen and compared
  c10::SmallVector<std::int64_t, 8> taken;       ///< pieces taken, by source
  std::int64_t staged = 0;                       ///< own steps copied into staging
  std::int64_t num_reduced = 0;
  std::int64_t num_gathered = 0;
  std::uint64_t first_reduced = 0;  ///< in the common count of all-reduce pieces
  bool done = false;                ///< the result may be read, the peers' inputs are read
};

/// The collectives of one rank over one group.
///
/// NOTE [shared-memory collectives]
/// A call is posted at once: its record says where the input lies, and `posted` lets the peers
/// read. Inputs in shared regions (or anywhere, between threads) are read where they are; others
/// are copied to staging in steps, as far as there is room. Readers take what is there: an
/// all-gather, broadcast or all-to-all copies from each source as it comes; a reduce-scatter adds
/// the ranks' pieces in rank order once all have come; an all-reduce does that for its own part of
/// every step, publishes it (`reduced`) and copies the others' parts. Calls are worked off in
/// order, so that one counter a rank (`finished`) tells which inputs are free again. Threads: one
/// at a time, except `forget`.
class CollectiveEngine : public IdleWorker, public std::enable_shared_from_this<CollectiveEngine> {
 public:
  /// Collective. Errors: as RegionSource::allocate.
  CollectiveEngine(
      GroupInfo info, std::shared_ptr<RegionSource> source, const SharedOptions& options
  );

  /// Errors: CommError once the group has failed; Unsupported for tensors that are not on the CPU.
  std::shared_ptr<PendingCall> post(SharedCall call);
  /// Works without blocking; true once the result may be read.
  bool test(PendingCall& pending);
  void wait(PendingCall& pending);
  void wait_released(PendingCall& pending);
  /// Ends this rank's part: peers that still need it fail. Never throws.
  void leave() noexcept;

  GroupSync& sync() { return sync_; }
  std::int64_t busy_ns() const { return busy_.busy_ns(); }
  /// Works off what can be worked off now.
  Advance progress(Lag& lag);
  /// The same while the thread waits on another communicator; see idle_work.h.
  State work() override;

  /// Allocates a region for tensors that collectives read in place, and its number.
  Region allocate_region(std::int64_t bytes, std::string_view what, RegionUse use);
  /// Allocates shared words that collectives do not know of.
  std::shared_ptr<SharedBuffer> allocate_control(std::int64_t bytes, std::string_view what);
  /// Takes a region off the table; calls in flight keep it. Threads: any.
  void forget(std::uint32_t region);

 private:
  // Posting (collective_engine.cpp).
  void wait_for_ring_room();
  std::shared_ptr<const RegionTable> regions() const;
  void fill_record(PendingCall& pending);
  void place_input(PendingCall& pending);
  void check_tensors(const SharedCall& call, const RegionTable& table) const;

  // Working (collective_steps.cpp).
  bool stage();
  bool stage_step(PendingCall& pending);
  bool see(PendingCall& pending, int peer, Lag& lag);
  bool see_all(PendingCall& pending, Lag& lag);
  void compare(const PendingCall& pending, const CallRecord& theirs, int peer);
  bool available(const PendingCall& pending, int source, std::int64_t step, Lag& lag) const;
  const std::byte* address(
      const PendingCall& pending, int source, std::int64_t step, const Piece& piece
  ) const;
  void consume(const PendingCall& pending, int source, std::uint64_t steps);
  Advance step(PendingCall& pending, Lag& lag);
  Advance take_from(PendingCall& pending, int source, Lag& lag);
  Advance gather_like(PendingCall& pending, Lag& lag);
  Advance reduce_scatter(PendingCall& pending, Lag& lag);
  Advance all_reduce(PendingCall& pending, Lag& lag);
  bool reduce_piece(PendingCall& pending, std::int64_t step, Lag& lag);
  bool gather_piece(PendingCall& pending, std::int64_t step, Lag& lag);
  void finish(PendingCall& pending);
  Advance drive(std::uint64_t last, Lag& lag);
  void drop_released();
  bool is_released(const PendingCall& pending, Lag& lag) const;
  bool is_complete(const PendingCall& pending, Lag& lag) const;
  WaitText wait_text(const PendingCall* pending) const;
  std::string describe(const CallRecord& record, const std::int64_t* counts) const;

  SharedOptions options_;
  GroupSync sync_;
  std::shared_ptr<SharedBuffer> staging_memory_;
  StagingRing staging_;
  std::uint64_t next_sequence_ = 0;
  std::uint64_t next_step_ = 0;
  std::uint64_t next_reduced_ = 0;
  BusyClock busy_;
  std::deque<std::shared_ptr<PendingCall>> pending_;     ///< not done
  std::deque<std::shared_ptr<PendingCall>> unreleased_;  ///< done, read in place
  std::uint32_t next_region_ = 0;
  mutable std::mutex regions_mutex_;
  std::shared_ptr<const RegionTable> regions_;
};

}  // namespace hypershard::comm::internal
