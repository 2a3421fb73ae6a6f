// Why: see delayed_hub.h. The caller picks, so that the order follows from its calls; the thread
// runs the inner collectives and writes results while the caller stands in wait() or test().
#include "hypershard/comm/delayed/internal/delayed_hub.h"

#include <chrono>
#include <cstring>
#include <utility>

#include "hypershard/core/clock.h"
#include "hypershard/core/error.h"

namespace hypershard::comm::internal {
namespace {

constexpr std::chrono::microseconds kPollEvery{100};
constexpr std::uint64_t kMaxLatenessUs = 200;
constexpr std::chrono::milliseconds kGiveWayAfter{100};
constexpr std::uint64_t kMaxFailedTests = 6;

void check_frozen(const DelayedItem& item) {
  for (const FrozenBytes& frozen : item.frozen) {
    const bool same =
        frozen.bytes == 0 ||
        std::memcmp(frozen.now, frozen.before, static_cast<std::size_t>(frozen.bytes)) == 0;
    HS_CHECK(
        same,
        "comm.delayed: the input of ",
        item.text,
        " was written to before the work was complete",
        HS_HINT("wait for the work, or for its release, before writing to its input")
    );
  }
}

}  // namespace

DelayedHub::DelayedHub(std::uint64_t seed)
    : error_rank_(hypershard::error_rank()),
      order_(seed),
      patience_(seed + 1),
      lateness_(seed + 2),
      thread_([this] { run(); }) {}

DelayedHub::~DelayedHub() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  for_worker_.notify_all();
  thread_.join();
}

std::shared_ptr<DelayedLane> DelayedHub::add_lane() {
  const std::lock_guard lock(mutex_);
  auto lane = std::make_shared<DelayedLane>();
  lanes_.push_back(lane);
  return lane;
}

void DelayedHub::post(DelayedLane& lane, std::shared_ptr<DelayedItem> item) {
  {
    const std::lock_guard lock(mutex_);
    item->tests_to_fail = static_cast<int>(patience_() % kMaxFailedTests);
    lane.items.push_back(item);
    unlaunched_.push_back(std::move(item));
  }
  for_worker_.notify_all();
}

std::shared_ptr<DelayedItem> DelayedHub::oldest(DelayedLane& lane) {
  while (!lane.items.empty() && lane.items.front()->complete) {
    lane.items.pop_front();
  }
  return lane.items.empty() ? nullptr : lane.items.front();
}

void DelayedHub::ask(DelayedItem& item) {
  if (!item.asked) {
    item.asked = true;
    item.asked_ns = now_ns();
    for_worker_.notify_all();
  }
}

void DelayedHub::complete(DelayedItem& item, std::unique_lock<std::mutex>& lock) {
  ask(item);
  for_caller_.wait(lock, [&] { return item.complete; });
}

// A peer may start its part of `picked` only after something that this rank does once it has
// `awaited`: then waiting for `picked` would never end.
void DelayedHub::complete_unless_stuck(
    DelayedItem& picked, const DelayedItem& awaited, std::unique_lock<std::mutex>& lock
) {
  ask(picked);
  while (!for_caller_.wait_for(lock, kGiveWayAfter, [&] { return picked.complete; })) {
    if (awaited.inner_done && !picked.inner_done) {
      picked.asked = false;
      return;
    }
  }
}

void DelayedHub::wait(DelayedLane& lane, DelayedItem& item) {
  std::unique_lock lock(mutex_);
  bool is_stuck = false;
  while (!item.complete && !is_stuck) {
    std::vector<std::shared_ptr<DelayedItem>> candidates;
    for (const auto& weak : lanes_) {
      const std::shared_ptr<DelayedLane> other = weak.lock();
      const auto head = other == nullptr ? nullptr : oldest(*other);
      if (head != nullptr) {
        candidates.push_back(head);
      }
    }
    const auto picked = candidates[order_() % candidates.size()];
    complete_unless_stuck(*picked, item, lock);
    is_stuck = !picked->complete;
  }
  while (!item.complete) {
    complete(*oldest(lane), lock);
  }
  oldest(lane);
  if (item.error != nullptr) {
    std::rethrow_exception(item.error);
  }
}

bool DelayedHub::test(DelayedLane& lane, DelayedItem& item) {
  std::unique_lock lock(mutex_);
  if (!item.complete && item.tests_to_fail > 0) {
    --item.tests_to_fail;
    return false;
  }
  while (!item.complete) {
    const std::shared_ptr<DelayedItem> head = oldest(lane);
    if (!head->inner_done) {
      return false;
    }
    complete(*head, lock);
  }
  if (item.error != nullptr) {
    std::rethrow_exception(item.error);
  }
  return true;
}

void DelayedHub::run() {
  const ThreadErrorRank rank(error_rank_.rank, error_rank_.world_size);
  std::unique_lock lock(mutex_);
  while (!stop_) {
    bool moved = launch_new(lock);
    moved = poll_inner(lock) || moved;
    moved = complete_asked(lock) || moved;
    if (moved || stop_) {
      continue;
    }
    if (in_flight_.empty()) {
      for_worker_.wait(lock, [this] { return stop_ || !unlaunched_.empty(); });
    } else {
      for_worker_.wait_for(lock, kPollEvery);
    }
  }
  unlaunched_.clear();
  in_flight_.clear();
}

bool DelayedHub::launch_new(std::unique_lock<std::mutex>& lock) {
  if (unlaunched_.empty()) {
    return false;
  }
  const std::shared_ptr<DelayedItem> item = unlaunched_.front();
  unlaunched_.pop_front();
  lock.unlock();
  WorkPtr work;
  std::exception_ptr error;
  try {
    work = item->launch();
  } catch (...) {  // raw-throw: rethrown by the caller's wait()
    error = std::current_exception();
  }
  lock.lock();
  item->work = std::move(work);
  item->error = error;
  item->inner_done = error != nullptr;
  in_flight_.push_back(item);
  return true;
}

bool DelayedHub::poll_inner(std::unique_lock<std::mutex>& lock) {
  bool moved = false;
  for (const auto& item : std::vector<std::shared_ptr<DelayedItem>>(in_flight_)) {
    if (item->inner_done) {
      continue;
    }
    const bool late =
        item->asked && static_cast<double>(now_ns() - item->asked_ns) * 1e-9 > item->timeout_s;
    lock.unlock();
    bool done = false;
    std::exception_ptr error;
    try {
      if (late) {
        item->work->wait();  // times out in its turn and says who is missing
      }
      done = item->work->test();
    } catch (...) {  // raw-throw: rethrown by the caller's wait()
      error = std::current_exception();
      done = true;
    }
    lock.lock();
    item->error = error;
    item->inner_done = done;
    moved = moved || done;
  }
  return moved;
}

bool DelayedHub::complete_asked(std::unique_lock<std::mutex>& lock) {
  bool moved = false;
  for (std::size_t i = 0; i < in_flight_.size();) {
    const std::shared_ptr<DelayedItem> item = in_flight_[i];
    if (!item->asked || !item->inner_done) {
      ++i;
      continue;
    }
    in_flight_.erase(in_flight_.begin() + static_cast<std::ptrdiff_t>(i));
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(lateness_() % kMaxLatenessUs));
    std::exception_ptr error = item->error;
    try {
      if (error == nullptr) {
        check_frozen(*item);
        for (const DelayedResult& result : item->results) {
          if (result.bytes > 0) {
            std::memcpy(result.output, result.result, static_cast<std::size_t>(result.bytes));
          }
        }
      }
    } catch (...) {  // raw-throw: rethrown by the caller's wait()
      error = std::current_exception();
    }
    lock.lock();
    item->error = error;
    item->complete = true;
    item->held.clear();
    item->work.reset();
    item->launch = nullptr;
    for_caller_.notify_all();
    moved = true;
  }
  return moved;
}

}  // namespace hypershard::comm::internal
