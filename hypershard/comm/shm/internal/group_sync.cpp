// Why: see group_sync.h. The order that makes sleeping safe: a sleeper announces whom it waits for
// and looks once more; a publisher raises its counter and then looks who waits. One of the two sees
// the other, because both use sequentially consistent accesses. Slices bound the cost of a mistake.
#include "hypershard/comm/shm/internal/group_sync.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "hypershard/comm/shm/internal/futex.h"
#include "hypershard/core/clock.h"
#include "hypershard/core/error.h"
#include "hypershard/core/process.h"

namespace hypershard::comm::internal {
namespace {

constexpr std::int64_t kSliceNs = 20'000'000;
constexpr std::int64_t kSpinNs = 20'000;
// A wait that lasts so long asks the rest of the job what is wrong.
constexpr std::int64_t kPatientNs = 1'000'000'000;

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

std::uint64_t bit(int rank) {
  return std::uint64_t{1} << (static_cast<unsigned>(rank) % 64U);
}

void ring_bell(RankCounters& counters) {
  counters.bell.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(counters.bell);
}

}  // namespace

void Lag::clear() {
  mask_ = 0;
  ranks_.clear();
}

void Lag::add(int rank) {
  mask_ |= bit(rank);
  if (!has(rank)) {
    ranks_.push_back(rank);
  }
}

bool Lag::has(int rank) const {
  return std::find(ranks_.begin(), ranks_.end(), rank) != ranks_.end();
}

void record_failure(const ControlBlock& block, int rank, std::string_view text) {
  FailureRecord& failure = block.failure();
  std::uint32_t none = 0;
  if (failure.state.compare_exchange_strong(none, 1, std::memory_order_acq_rel)) {
    const std::size_t length = std::min(text.size(), kFailureText - 1);
    std::memcpy(failure.text, text.data(), length);
    failure.text[length] = '\0';
    failure.rank = rank;
    failure.state.store(2, std::memory_order_seq_cst);
  }
  for (int peer = 0; peer < block.size(); ++peer) {
    ring_bell(block.counters(peer));
  }
}

std::string call_text(const CallRecord& record, std::string_view communicator) {
  std::string text = to_text(static_cast<Op>(record.op)) + concat_text(" #", record.sequence);
  text += record.unit[0] == '\0' ? "" : concat_text(" for unit '", record.unit, "'");
  return text + concat_text(" on '", communicator, "'");
}

/// The clock of one wait: when it last moved, when to look at the peers' health again.
class GroupSync::Sleep {
 public:
  explicit Sleep(GroupSync& sync) : sync_(sync), work_ns_(sync.stats_.reduce_ns) {}
  Sleep(const Sleep&) = delete;
  Sleep& operator=(const Sleep&) = delete;
  ~Sleep() {
    awake();
    sync_.stats_.wait_ns +=
        now_ns() - start_ns_ - (sync_.stats_.reduce_ns - work_ns_) - elsewhere_ns_;
  }

  /// Announces the ranks to be woken by, before the last look.
  void announce(std::uint64_t mask) {
    announced_ = mask;
    sync_.block_.interest(sync_.rank()).store(mask, std::memory_order_seq_cst);
  }
  void awake() {
    if (announced_ != 0) {
      announce(0);
    }
  }
  bool covers(std::uint64_t mask) const { return (mask & ~announced_) == 0; }

  void moved() { moved_ns_ = now_ns(); }
  /// Lets the thread do its part on other communicators, whose time that is.
  IdleWorker::State work_elsewhere() { return IdleWork::work(sync_.worker_, elsewhere_ns_); }
  bool spinning() const { return now_ns() - moved_ns_ < kSpinNs; }
  bool timed_out() const {
    return static_cast<double>(now_ns() - moved_ns_) * 1e-9 > sync_.info_.timeout_s;
  }
  bool is_long() const { return now_ns() - moved_ns_ > kPatientNs; }
  bool slice_over() {
    const std::int64_t now = now_ns();
    if (now < next_look_ns_) {
      return false;
    }
    next_look_ns_ = now + kSliceNs;
    return true;
  }

 private:
  GroupSync& sync_;
  std::int64_t work_ns_;
  std::int64_t start_ns_ = now_ns();
  std::int64_t elsewhere_ns_ = 0;
  std::int64_t moved_ns_ = start_ns_;
  std::int64_t next_look_ns_ = start_ns_ + kSliceNs;
  std::uint64_t announced_ = 0;
};

GroupSync::GroupSync(GroupInfo info, std::shared_ptr<RegionSource> source)
    : info_(std::move(info)), source_(std::move(source)) {
  const int size = static_cast<int>(info_.global_ranks.size());
  control_ =
      source_->allocate(ControlBlock::bytes(size), "control block", RegionUse::kControl, [] {});
  block_ = ControlBlock(control_->write(), size);
  spins_ = available_cores() >= size;
}

void GroupSync::publish(std::atomic<std::uint64_t>& counter, std::uint64_t value) {
  counter.store(value, std::memory_order_seq_cst);
  ring();
}

void GroupSync::ring() {
  for (int peer = 0; peer < size(); ++peer) {
    if ((block_.interest(peer).load(std::memory_order_seq_cst) & bit(rank())) != 0) {
      ring_bell(block_.counters(peer));
    }
  }
}

void GroupSync::leave() noexcept {
  block_.counters(rank()).left.store(1, std::memory_order_seq_cst);
  for (int peer = 0; peer < size(); ++peer) {
    ring_bell(block_.counters(peer));
  }
}

void GroupSync::check() const {
  const FailureRecord& failure = block_.failure();
  if (failure.state.load(std::memory_order_acquire) != 2) [[likely]] {
    return;
  }
  const std::string by = failure.rank < 0 ? "" : " (found by " + rank_text(failure.rank) + ")";
  HS_FAIL(CommError, "comm.", source_->name(), ": ", std::string(failure.text), by);
}

void GroupSync::fail(const std::string& text) {
  record_failure(block_, rank(), text);
  HS_FAIL(CommError, "comm.", source_->name(), ": ", text);
}

void GroupSync::wait_until(const std::function<Advance(Lag&)>& advance, MakeWaitText text) {
  lag_.clear();
  Advance state = advance(lag_);  // first: what is complete stays good when the group fails later
  if (state == Advance::kDone) {
    return;
  }
  Sleep sleep(*this);
  std::function<std::string()> why;
  while (state != Advance::kDone) {
    if (spins_ && sleep.spinning()) {
      relax();
    } else {
      sleep.announce(lag_.mask());
    }
    RankCounters& mine = block_.counters(rank());
    const std::uint32_t bell = mine.bell.load(std::memory_order_seq_cst);
    lag_.clear();
    state = advance(lag_);
    const auto elsewhere =
        state == Advance::kStuck ? sleep.work_elsewhere() : IdleWorker::State::kNothing;
    if (state == Advance::kMoved) {
      sleep.moved();
      sleep.awake();
      why = nullptr;
    } else if (elsewhere == IdleWorker::State::kMoved) {
      continue;  // which a peer may have waited for
    } else if (state == Advance::kStuck && lag_.mask() != 0 && sleep.covers(lag_.mask())) {
      check();
      const Stopwatch asleep;
      const bool is_alone = elsewhere == IdleWorker::State::kNothing;
      futex_wait(mine.bell, bell, is_alone ? kSliceNs : kIdleSliceNs);
      stats_.asleep_ns += asleep.elapsed_ns();
      if (!check_left(advance, text) && sleep.slice_over()) {
        check_lost(advance, text);
        if (why == nullptr && sleep.is_long()) {
          why = source_->watch_stall(text().during());
        }
        if (sleep.timed_out()) {
          check_time(advance, text, why);
        }
      }
    }
  }
}

bool GroupSync::check_left(const std::function<Advance(Lag&)>& advance, MakeWaitText text) {
  const std::vector<int> ranks(
      lag_.ranks().begin(), lag_.ranks().end()
  );  // `advance` fills it anew
  for (const int peer : ranks) {
    if (block_.counters(peer).left.load(std::memory_order_seq_cst) == 0) {
      continue;
    }
    // What the peer did before it left may have come in since the last look.
    lag_.clear();
    if (advance(lag_) == Advance::kStuck && lag_.has(peer)) {
      fail(
          rank_text(peer) + " left (its communicator was destroyed) during " + text().during() +
          "; " + last_call_text(peer)
      );
    }
    return true;
  }
  return false;
}

void GroupSync::check_lost(const std::function<Advance(Lag&)>& advance, MakeWaitText text) {
  for (const int lost : source_->lost_peers()) {
    if (block_.counters(lost).left.load(std::memory_order_seq_cst) == 0) {
      fail_if_still_stuck(advance, [&] {
        return rank_text(lost) + " died (its connection closed) during " + text().during() + "; " +
               last_call_text(lost);
      });
    }
  }
}

void GroupSync::check_time(
    const std::function<Advance(Lag&)>& advance,
    MakeWaitText text,
    const std::function<std::string()>& why
) {
  fail_if_still_stuck(advance, [&] {
    std::string all;
    for (const int peer : lag_.ranks()) {
      all += all.empty() ? "" : "; ";
      all += rank_text(peer) + " " + text().missing(peer) +
             concat_text(" within ", info_.timeout_s, " s; ") + last_call_text(peer);
    }
    // The peers may wait for somebody outside the group in their turn.
    const std::string cause = why ? why() : "";
    return cause.empty() ? all : all + "; " + cause;
  });
}

void GroupSync::glance(const std::function<Advance(Lag&)>& advance, MakeWaitText text) {
  check();
  const std::int64_t now = now_ns();
  if (now < next_glance_ns_) {
    return;
  }
  next_glance_ns_ = now + kSliceNs;
  lag_.clear();
  if (advance(lag_) == Advance::kStuck && !check_left(advance, text)) {
    check_lost(advance, text);
  }
}

void GroupSync::fail_if_still_stuck(
    const std::function<Advance(Lag&)>& advance, const std::function<std::string()>& failure
) {
  lag_.clear();
  if (advance(lag_) == Advance::kStuck) {
    fail(failure());
  }
}

std::string GroupSync::rank_text(int rank) const {
  const int global = info_.global_ranks[static_cast<std::size_t>(rank)];
  return concat_text("rank ", rank, " (global ", global, ")");
}

std::string GroupSync::last_call_text(int rank) const {
  const std::uint64_t posted = block_.counters(rank).posted.load(std::memory_order_acquire);
  if (posted == 0) {
    return "it has called no collective on '" + info_.name + "'";
  }
  const CallRecord& record = block_.record(rank, posted - 1);
  std::string text = "its last collective was " + to_text(static_cast<Op>(record.op));
  text += concat_text(" #", record.sequence);
  return text + (record.unit[0] == '\0' ? "" : concat_text(" (unit '", record.unit, "')"));
}

}  // namespace hypershard::comm::internal
