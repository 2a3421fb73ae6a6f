// See idle_work.h.
#include "hypershard/comm/internal/idle_work.h"

#include <algorithm>
#include <vector>

#include "hypershard/core/clock.h"

namespace hypershard::comm::internal {

namespace {

std::vector<std::weak_ptr<IdleWorker>>& workers() {
  thread_local std::vector<std::weak_ptr<IdleWorker>> own;
  return own;
}

}  // namespace

void IdleWork::adopt(const std::shared_ptr<IdleWorker>& worker) {
  std::vector<std::weak_ptr<IdleWorker>>& own = workers();
  if (worker->owner_.exchange(&own) != &own) {
    std::erase_if(own, [](const std::weak_ptr<IdleWorker>& each) { return each.expired(); });
    own.push_back(worker);
  }
}

IdleWorker::State IdleWork::work(const IdleWorker* except, std::int64_t& moved_ns) {
  const std::int64_t began_ns = now_ns();
  std::vector<std::weak_ptr<IdleWorker>>& own = workers();
  IdleWorker::State state = IdleWorker::State::kNothing;
  for (const std::weak_ptr<IdleWorker>& each : own) {
    const std::shared_ptr<IdleWorker> worker = each.lock();
    if (worker && worker.get() != except && worker->owner_.load() == &own) {
      state = std::max(state, worker->work());
    }
  }
  moved_ns += state == IdleWorker::State::kMoved ? now_ns() - began_ns : 0;
  return state;
}

}  // namespace hypershard::comm::internal
