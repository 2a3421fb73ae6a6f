// The calls of other threads; the thread is in health_state.cpp, the sentences in
// health_diagnosis.cpp.
#include "hypershard/comm/c10d/health.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "hypershard/comm/c10d/internal/health_state.h"
#include "hypershard/core/clock.h"
#include "hypershard/core/env.h"
#include "hypershard/core/error.h"

namespace hypershard::comm {

namespace {

using internal::HealthStatus;

// Long enough to miss two heartbeats of a rank that has just died.
constexpr double kExplainBeats = 3;

}  // namespace

std::string to_text(const CollectiveNote& note) {
  if (note.communicator.empty()) {
    return note.op;  // not a collective of a communicator: the end of the job
  }
  std::string text = note.op + " #" + std::to_string(note.sequence);
  text += note.unit.empty() ? "" : " of unit '" + note.unit + "'";
  text += " on axis '" + note.communicator + "'";
  return text + (note.crosses_supernodes ? " between supernodes" : "");
}

Health::Health(c10::intrusive_ptr<::c10d::Store> store, const HealthOptions& options) {
  HS_CHECK(store != nullptr, "comm.health: the store is null");
  state_ = std::make_shared<internal::HealthState>(std::move(store), options);
  internal::HealthState& state = *state_;
  if (options.heartbeat_s <= 0) {
    state.options.heartbeat_s = static_cast<double>(env::get_duration_ms("HS_HEARTBEAT_MS")) * 1e-3;
  }
  state.create_keys();
  {
    std::unique_lock lock(state.mutex);
    state.round(lock);
  }
  state.thread = std::thread([shared = state_] { shared->run(); });
}

Health::~Health() {
  std::unique_lock lock(state_->mutex);
  state_->is_stopping = true;
  state_->wake.notify_all();
  const double patience_s =
      state_->store_hangs() ? 0.0 : std::max(1.0, 2 * state_->options.heartbeat_s);
  state_->changed.wait_for(lock, std::chrono::duration<double>(patience_s), [&] {
    return state_->has_ended;
  });
  const bool has_ended = state_->has_ended;
  lock.unlock();
  if (!state_->thread.joinable()) {
    return;
  }
  if (has_ended) {
    state_->thread.join();
  } else {
    state_->thread.detach();  // it hangs in the store and owns its state
  }
}

double Health::heartbeat_s() const {
  return state_->options.heartbeat_s;
}

void Health::note(CollectiveNote note) {
  const std::lock_guard lock(state_->mutex);
  state_->own.note = std::move(note);
}

Health::Watch::Watch(Health* health, std::vector<int> ranks) : health_(health) {
  internal::HealthState& state = *health->state_;
  const std::lock_guard lock(state.mutex);
  if (state.watches.empty()) {
    state.peers.clear();  // what was read long ago says nothing about now
  }
  id_ = state.next_watch++;
  state.watches.emplace(id_, std::move(ranks));
  state.has_request = true;
  state.wake.notify_all();
}

Health::Watch::~Watch() {
  const std::lock_guard lock(health_->state_->mutex);
  health_->state_->watches.erase(id_);
}

std::optional<std::string> Health::verdict(const GroupInfo& group, const Stall& stall) const {
  const internal::HealthState& state = *state_;
  const std::lock_guard lock(state.mutex);
  // Silence alone is no verdict: a stopped rank may go on. That is what the timeout is for.
  if (state.first_failure && state.first_failure->rank != state.options.rank) {
    return state.cause(group, stall);
  }
  return state.mismatch(group, stall);
}

std::string Health::explain(const GroupInfo& group, const Stall& stall) {
  const Watch watch(this, group.global_ranks);
  internal::HealthState& state = *state_;
  std::unique_lock lock(state.mutex);
  const double deadline_s = now_s() + kExplainBeats * state.options.heartbeat_s;
  while (true) {
    state.request(lock, std::max(0.0, deadline_s - now_s()));
    if (state.cause(group, stall) || !state.store_error.empty() || state.store_hangs() ||
        now_s() >= deadline_s) {
      return state.conclusion(group, stall);
    }
    state.changed.wait_for(lock, std::chrono::duration<double>(0.25 * state.options.heartbeat_s));
  }
}

void Health::report_failure(std::string_view text) {
  internal::HealthState& state = *state_;
  std::unique_lock lock(state.mutex);
  if (state.own.status > HealthStatus::kFinished) {
    return;
  }
  state.own.status = HealthStatus::kFailed;
  state.own_failure = text.empty() ? "no reason given" : text;
  state.request(lock, 2 * state.options.heartbeat_s);
}

// Polls quickly at first: ranks of a healthy job end within milliseconds of each other.
void Health::finish(double timeout_s) {
  internal::HealthState& state = *state_;
  GroupInfo job;
  job.name = "job";
  Stall stall;
  stall.note.op = "shutdown";
  const Stopwatch stopwatch;
  // First nobody's heartbeat is read, only how many have finished; whoever waits long wants to know
  // more.
  const Watch watch(this, {});
  double pause_s = 1e-3;
  std::unique_lock lock(state.mutex);
  state.own.status = HealthStatus::kFinished;
  while (true) {
    state.request(lock, 2 * state.options.heartbeat_s);
    if (state.num_finished >= state.options.world_size) {
      return;
    }
    const double waited_s = stopwatch.elapsed_s();
    const bool is_over = waited_s >= timeout_s || !state.store_error.empty() || state.store_hangs();
    if (is_over || state.first_failure) {
      stall.timed_out = waited_s >= timeout_s;
      stall.waited_s = waited_s;
      break;
    }
    state.changed.wait_for(lock, std::chrono::duration<double>(pause_s));
    pause_s = std::min(2 * pause_s, 0.25 * state.options.heartbeat_s);
  }
  lock.unlock();
  for (int rank = 0; rank < state.options.world_size; ++rank) {
    job.global_ranks.push_back(rank);
  }
  const std::string why = explain(job, stall);
  report_failure(why);
  HS_FAIL(CommError, "comm.world: ", why);
}

void Health::leave() {
  internal::HealthState& state = *state_;
  std::unique_lock lock(state.mutex);
  if (state.own.status <= HealthStatus::kFinished) {
    state.own.status = HealthStatus::kLeft;
    state.request(lock, 2 * state.options.heartbeat_s);
  }
  state.is_stopping = true;
  state.wake.notify_all();
}

void Health::linger(double seconds) {
  const Watch watch(this, {});
  internal::HealthState& state = *state_;
  std::unique_lock lock(state.mutex);
  const double deadline_s = now_s() + seconds;
  while (now_s() < deadline_s && state.store_error.empty() && !state.has_ended) {
    state.request(lock, std::max(0.0, deadline_s - now_s()));
    if (state.num_others_gone() >= state.options.world_size - 1) {
      return;
    }
    state.changed.wait_for(lock, std::chrono::duration<double>(0.1 * state.options.heartbeat_s));
  }
}

}  // namespace hypershard::comm
