// See publisher.h.
#include "hypershard/shard/publisher.h"

#include <algorithm>
#include <utility>

#include "hypershard/core/clock.h"
#include "hypershard/core/error.h"

namespace hypershard::shard {

namespace {

// Back ends hold some hundred collectives of one communicator in flight and then make the caller
// wait, for peers that may be waiting for the caller. Far fewer keep any link busy.
constexpr std::size_t kMaxGathersAhead = 128;

/// Adds the time of its life to a counter, and to a second one if that is given.
class WaitTimer {
 public:
  WaitTimer(std::int64_t* counter, std::int64_t* second) : counter_(counter), second_(second) {}
  ~WaitTimer() {
    const std::int64_t waited_ns = now_ns() - began_ns_;
    *counter_ += waited_ns;
    if (second_ != nullptr) {
      *second_ += waited_ns;
    }
  }
  WaitTimer(const WaitTimer&) = delete;
  WaitTimer& operator=(const WaitTimer&) = delete;

 private:
  std::int64_t* counter_;
  std::int64_t* second_;
  std::int64_t began_ns_ = now_ns();
};

}  // namespace

Publisher::Publisher(
    const std::vector<std::unique_ptr<Unit>>* units,
    const DataParallel& parallel,
    std::shared_ptr<comm::EpochBoard> epochs,
    Counters* counters
)
    : units_(units),
      epochs_(std::move(epochs)),
      counters_(counters),
      early_(units->size(), false),
      seen_(units->size(), 0),
      turns_(units->size(), 0) {
  int num_stages = 0;
  for (int level = parallel.runtime_levels; level < parallel.update_levels; ++level) {
    const DataAxis& axis = parallel.cuts[static_cast<std::size_t>(level)];
    num_stages += axis.size > 1 ? 1 : 0;
    crosses_ = crosses_ || (axis.size > 1 && axis.gather->info().tier == layout::Tier::kInter);
    may_start_early_ = may_start_early_ || (crosses_ && axis.name == parallel.replicate_axis &&
                                            level < parallel.gradient_levels);
  }
  gathers_ = num_stages > 0;
  // A later stage would share its communicator with others, whose order depends on timing.
  may_start_early_ = may_start_early_ && num_stages == 1;
  std::size_t most_groups = 1;
  for (const auto& each : *units) {
    most_groups = std::max(most_groups, each->groups().size());
  }
  ahead_ = std::max<std::size_t>(1, kMaxGathersAhead / most_groups);
}

void Publisher::begin_early(int index) {
  HS_ASSERT(
      !early_[static_cast<std::size_t>(index)],
      "shard: unit '",
      unit(index).path(),
      "' was published early twice"
  );
  early_[static_cast<std::size_t>(index)] = true;
  ++num_early_;
  unit(index).write_runtime(/*even_frozen=*/false);
  flights_.push_back({.unit = index, .epoch = epoch_ + 1, .work = nullptr, .span = {}});
  start_up_to(arrived_ + ahead_);
}

void Publisher::forget_early() {
  early_.assign(early_.size(), false);
  num_early_ = 0;
}

void Publisher::begin(const std::vector<int>& order, bool written, bool even_frozen) {
  HS_ASSERT(flights_.empty(), "shard: ", flights_.size(), " publishes are left of the last window");
  ++epoch_;
  for (const int index : order) {
    if (early_[static_cast<std::size_t>(index)]) {
      continue;
    }
    const bool is_new = written && unit(index).write_runtime(even_frozen);
    if (!is_new || !gathers_) {
      announce(index, epoch_);
      continue;
    }
    flights_.push_back({.unit = index, .epoch = epoch_, .work = nullptr, .span = {}});
    turns_[static_cast<std::size_t>(index)] = flights_.size();
    start_up_to(ahead_);
  }
  forget_early();
}

void Publisher::start_up_to(std::size_t end) {
  for (const std::size_t last = std::min(end, flights_.size()); started_ < last; ++started_) {
    Flight& flight = flights_[started_];
    flight.span.begin();
    flight.work = unit(flight.unit).start_publish();
  }
}

// The oldest publish has arrived.
void Publisher::take_oldest() {
  Flight& flight = flights_[arrived_];
  // Beside the thread, as the unshards that may follow it.
  flight.span.end(TraceLane::kUnshard, "publish ", unit(flight.unit).path());
  ++arrived_;
  announce(flight.unit, flight.epoch);
}

void Publisher::announce(int unit, std::uint64_t epoch) {
  if (epochs_) {
    epochs_->publish(published_row(unit), epoch);
  }
}

void Publisher::advance() {
  while (arrived_ < started_ && flights_[arrived_].work->test()) {
    take_oldest();
  }
}

void Publisher::wait_up_to(std::size_t end) {
  while (arrived_ < end) {
    start_up_to(arrived_ + ahead_);
    const Flight& oldest = flights_[arrived_];
    const TraceSpan span(TraceLane::kWait, "publish ", unit(oldest.unit).path());
    {
      const WaitTimer timer(
          &counters_->publish_wait_ns, crosses_ ? &counters_->inter_publish_wait_ns : nullptr
      );
      oldest.work->wait();
    }
    take_oldest();
  }
  start_up_to(end + ahead_);
}

void Publisher::await_own_part(const Unit& unit) {
  if (turn(unit) > 0) {
    wait_up_to(turn(unit));
  }
}

void Publisher::await(const Unit& unit) {
  await_own_part(unit);
  std::uint64_t& seen = seen_[static_cast<std::size_t>(unit.index())];
  if (!epochs_ || seen == epoch_ || !unit.shares_memory()) {
    return;
  }
  const int row = published_row(unit.index());
  if (!epochs_->reached(row, epoch_)) {
    const TraceSpan span(TraceLane::kWait, "publish ", unit.path());
    const WaitTimer timer(&counters_->publish_wait_ns, nullptr);
    epochs_->wait_all(row, epoch_, "publish of runtime parameters", unit.path());
  }
  seen = epoch_;
}

void Publisher::await_all() {
  wait_up_to(flights_.size());
}

void Publisher::release() {
  await_all();
  for (const Flight& flight : flights_) {
    flight.work->wait_released();
  }
  flights_.clear();
  turns_.assign(turns_.size(), 0);
  started_ = 0;
  arrived_ = 0;
}

}  // namespace hypershard::shard
