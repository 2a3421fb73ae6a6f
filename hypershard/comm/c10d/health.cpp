// One record a rank under `health/<rank>`, the first failure under `health/failure`. The thread and
// the object share their state, so that a thread which hangs in the store can be left behind.
#include "hypershard/comm/c10d/health.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "hypershard/core/clock.h"
#include "hypershard/core/env.h"
#include "hypershard/core/error.h"
#include "hypershard/core/log.h"

namespace hypershard::comm {
namespace {

// A rank counts as silent after so many heartbeats without a new one.
constexpr double kSilentBeats = 2;
// All ranks are read in jobs up to this size, else only those of the stalled group.
constexpr int kReadAllUpTo = 256;
constexpr char kSeparator = '\x1f';
constexpr const char* kFailureKey = "health/failure";
// How many ranks have finished their work, and how many will not come back.
constexpr const char* kFinishedKey = "health/finished";
constexpr const char* kLeftKey = "health/left";

std::string key_of(int rank) {
  return "health/" + std::to_string(rank);
}

enum class Status { kAlive, kFinished, kLeft, kFailed };

struct Record {
  std::uint64_t counter = 0;
  Status status = Status::kAlive;
  CollectiveNote note;
};

std::string encode(const Record& record) {
  const CollectiveNote& note = record.note;
  std::string text = std::to_string(record.counter);
  for (const std::string& field :
       {std::to_string(static_cast<int>(record.status)),
        note.communicator,
        note.op,
        note.unit,
        std::to_string(note.sequence),
        std::to_string(note.signature),
        note.detail}) {
    text += kSeparator + field;
  }
  return text;
}

std::uint64_t number(std::string_view text) {
  std::uint64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

Record decode(std::string_view text) {
  std::string_view fields[8];
  for (std::string_view& field : fields) {
    const std::size_t end = text.find(kSeparator);
    field = text.substr(0, end);
    text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
  }
  Record record;
  record.counter = number(fields[0]);
  record.status = static_cast<Status>(number(fields[1]));
  record.note.communicator = fields[2];
  record.note.op = fields[3];
  record.note.unit = fields[4];
  record.note.sequence = number(fields[5]);
  record.note.signature = number(fields[6]);
  record.note.detail = fields[7];
  return record;
}

std::vector<std::uint8_t> to_bytes(std::string_view text) {
  return {text.begin(), text.end()};
}

struct Peer {
  Record record;
  bool is_seen = false;
  double changed_s = 0;  // when its counter was last seen to move
};

// The first failure of the job: `<rank><separator><text>`.
struct FirstFailure {
  int rank = -1;
  std::string text;
};

std::string seconds_text(double seconds) {
  const auto tenths = static_cast<long long>(seconds * 10 + 0.5);
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " s";
}

std::string last_collective(const CollectiveNote& note) {
  return note.communicator.empty() ? "it had started no collective"
                                   : "its last collective was " + to_text(note);
}

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size() && i < 16; ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return ranks.size() > 16 ? text + ", ... (" + std::to_string(ranks.size()) + " in all)" : text;
}

}  // namespace

std::string to_text(const CollectiveNote& note) {
  if (note.communicator.empty()) {
    return note.op;  // not a collective of a communicator: the end of the job
  }
  std::string text = note.op + " #" + std::to_string(note.sequence);
  text += note.unit.empty() ? "" : " of unit '" + note.unit + "'";
  return text + " on axis '" + note.communicator + "'";
}

struct Health::State {
  c10::intrusive_ptr<::c10d::Store> store;
  HealthOptions options;

  mutable std::mutex mutex;
  std::condition_variable wake;     // for the thread: something is asked of it
  std::condition_variable changed;  // for others: a round has ended
  Record own;
  std::string own_failure;  // to be written as the job's first failure, if none is there
  std::map<int, std::vector<int>> watches;
  int next_watch = 0;
  std::map<int, Peer> peers;
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

  double silent_s() const { return kSilentBeats * options.heartbeat_s; }

  void run();
  void round(std::unique_lock<std::mutex>& lock);
  std::vector<int> ranks_to_read() const;
  void take(const std::vector<int>& ranks, const std::vector<std::vector<std::uint8_t>>& values);
  void request(std::unique_lock<std::mutex>& lock, double seconds);

  std::vector<int> silent_ranks(const std::vector<int>& ranks) const;
  bool store_hangs() const;
  std::optional<std::string> cause(const GroupInfo& group, const Stall& stall) const;
  std::string silent_text(const std::vector<int>& silent, const Stall& stall) const;
  std::optional<std::string> mismatch(const GroupInfo& group, const Stall& stall) const;
  std::string lag_text(const GroupInfo& group, const Stall& stall) const;
};

std::vector<int> Health::State::ranks_to_read() const {
  std::vector<int> ranks;
  if (watches.empty()) {
    return ranks;
  }
  if (options.world_size <= kReadAllUpTo) {
    for (int rank = 0; rank < options.world_size; ++rank) {
      ranks.push_back(rank);
    }
  } else {
    for (const auto& [id, watched] : watches) {
      ranks.insert(ranks.end(), watched.begin(), watched.end());
    }
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  }
  std::erase(ranks, options.rank);
  return ranks;
}

void Health::State::take(
    const std::vector<int>& ranks, const std::vector<std::vector<std::uint8_t>>& values
) {
  const double now = now_s();
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    Peer& peer = peers[ranks[i]];
    const Record record = decode(std::string(values[i].begin(), values[i].end()));
    if (!peer.is_seen || record.counter != peer.record.counter) {
      peer.changed_s = now;
    }
    peer.is_seen = true;
    peer.record = record;
  }
  const auto extra = [&](std::size_t i) {
    const std::vector<std::uint8_t>& value = values[ranks.size() + i];
    return std::string(value.begin(), value.end());
  };
  num_finished = static_cast<std::int64_t>(number(extra(1)));
  num_left = static_cast<std::int64_t>(number(extra(2)));
  const std::string failure = extra(0);
  if (!failure.empty() && !first_failure) {
    const std::size_t end = failure.find(kSeparator);
    first_failure =
        FirstFailure{static_cast<int>(number(failure.substr(0, end))), failure.substr(end + 1)};
  }
  last_read_s = now;
}

// One exchange with the store. The lock is released meanwhile: the store may hang.
void Health::State::round(std::unique_lock<std::mutex>& lock) {
  ++own.counter;
  const std::string record = encode(own);
  const std::string failure = std::exchange(own_failure, {});
  const std::vector<int> ranks = ranks_to_read();
  const bool counts_finished = own.status == Status::kFinished && !is_finished_counted;
  const bool counts_left = own.status > Status::kFinished && !is_left_counted;
  is_finished_counted = is_finished_counted || counts_finished;
  is_left_counted = is_left_counted || counts_left;
  const bool reads = !watches.empty();
  in_round = true;
  round_start_s = now_s();
  lock.unlock();
  std::vector<std::vector<std::uint8_t>> values;
  std::string error_text;
  try {
    store->set(key_of(options.rank), to_bytes(record));
    if (!failure.empty()) {
      store->compareSet(
          kFailureKey, to_bytes(""), to_bytes(std::to_string(options.rank) + kSeparator + failure)
      );
    }
    if (counts_finished) {
      store->add(kFinishedKey, 1);
    }
    if (counts_left) {
      store->add(kLeftKey, 1);
    }
    if (reads) {
      std::vector<std::string> keys;
      for (const int rank : ranks) {
        keys.push_back(key_of(rank));
      }
      keys.insert(keys.end(), {kFailureKey, kFinishedKey, kLeftKey});
      values = store->multiGet(keys);
    }
  } catch (const std::exception& error) {
    error_text = error.what();
  }
  lock.lock();
  in_round = false;
  store_error = error_text;
  if (!values.empty()) {
    take(ranks, values);
  }
  ++num_rounds;
  changed.notify_all();
}

void Health::State::run() {
  std::unique_lock lock(mutex);
  // A store that has failed once stays failed: its client does not connect again.
  while (!is_stopping && store_error.empty()) {
    wake.wait_for(lock, std::chrono::duration<double>(options.heartbeat_s), [&] {
      return is_stopping || has_request;
    });
    has_request = false;
    if (!is_stopping || (own.status > Status::kFinished && !is_left_counted)) {
      round(lock);
    }
  }
  has_ended = true;
  changed.notify_all();
}

// Has the thread do a round now and waits for the end of one that began after the call.
void Health::State::request(std::unique_lock<std::mutex>& lock, double seconds) {
  const std::uint64_t wanted = num_rounds + (in_round ? 2 : 1);
  has_request = true;
  wake.notify_all();
  changed.wait_for(lock, std::chrono::duration<double>(seconds), [&] {
    return num_rounds >= wanted || has_ended;
  });
}

std::vector<int> Health::State::silent_ranks(const std::vector<int>& ranks) const {
  std::vector<int> silent;
  for (const int rank : ranks) {
    const auto found = peers.find(rank);
    if (found != peers.end() && found->second.is_seen &&
        found->second.record.status <= Status::kFinished &&
        last_read_s - found->second.changed_s >= silent_s()) {
      silent.push_back(rank);
    }
  }
  return silent;
}

bool Health::State::store_hangs() const {
  return in_round && now_s() - round_start_s >= silent_s();
}

std::string Health::State::silent_text(const std::vector<int>& silent, const Stall& stall) const {
  const Peer& first = peers.at(silent.front());
  const bool is_closed = !stall.timed_out && !stall.transport_text.empty();
  std::string text = ranks_text(silent);
  if (is_closed) {
    text += " died";
  } else {
    text += silent.size() == 1 ? " has died or is stopped" : " have died or are stopped";
  }
  text += " (no sign of life for " + seconds_text(last_read_s - first.changed_s) + ")";
  text += " during " + to_text(stall.note) + "; ";
  text += silent.size() == 1 ? "" : ranks_text({silent.front()}) + ": ";
  return text + last_collective(first.record.note);
}

// Tells whether a peer stands in a collective of the same number that is not the same.
std::optional<std::string> Health::State::mismatch(const GroupInfo& group, const Stall& stall)
    const {
  for (const int rank : group.global_ranks) {
    const auto found = peers.find(rank);
    if (found == peers.end() || !found->second.is_seen) {
      continue;
    }
    const CollectiveNote& theirs = found->second.record.note;
    if (theirs.communicator == stall.note.communicator && theirs.sequence == stall.note.sequence &&
        theirs.signature != stall.note.signature) {
      return "the ranks call different collectives: rank " + std::to_string(options.rank) + " " +
             to_text(stall.note) + " (" + stall.note.detail + "), rank " + std::to_string(rank) +
             " " + to_text(theirs) + " (" + theirs.detail + ")";
    }
  }
  return std::nullopt;
}

// Says who failed, died, left or is elsewhere; nothing while nobody is known to.
std::optional<std::string> Health::State::cause(const GroupInfo& group, const Stall& stall) const {
  std::vector<int> others;
  for (const auto& [rank, peer] : peers) {
    others.push_back(rank);
  }
  std::vector<int> silent = silent_ranks(group.global_ranks);
  silent = silent.empty() ? silent_ranks(others) : silent;
  if (!silent.empty()) {
    return silent_text(silent, stall);
  }
  if (first_failure && first_failure->rank != options.rank) {
    return "rank " + std::to_string(first_failure->rank) + " failed first, so " +
           to_text(stall.note) + " cannot complete; it said: " + first_failure->text;
  }
  for (const int rank : group.global_ranks) {
    const auto found = peers.find(rank);
    if (found == peers.end() || found->second.record.status <= Status::kFinished) {
      continue;
    }
    const bool has_left = found->second.record.status == Status::kLeft;
    return "rank " + std::to_string(rank) + (has_left ? " has ended its job" : " failed") +
           " before " + to_text(stall.note) + "; " + last_collective(found->second.record.note);
  }
  return mismatch(group, stall);
}

std::string Health::State::lag_text(const GroupInfo& group, const Stall& stall) const {
  std::string text = to_text(stall.note);
  text += stall.timed_out ? " timed out after " + seconds_text(stall.waited_s) : " failed";
  text += " although every rank is alive";
  // Behind is who has not reached this collective of this communicator.
  int behind = -1;
  for (const int rank : group.global_ranks) {
    const auto found = peers.find(rank);
    if (found == peers.end() || !found->second.is_seen) {
      continue;
    }
    const CollectiveNote& theirs = found->second.record.note;
    const bool is_here = stall.note.communicator.empty()
                             ? found->second.record.status == Status::kFinished
                             : theirs.communicator == stall.note.communicator &&
                                   theirs.sequence >= stall.note.sequence;
    if (!is_here && (behind < 0 || rank == stall.awaited_rank)) {
      behind = rank;
    }
  }
  if (behind >= 0) {
    text += "; rank " + std::to_string(behind) +
            " lags: " + last_collective(peers.at(behind).record.note);
  } else if (stall.awaited_rank) {
    text += "; the message of rank " + std::to_string(*stall.awaited_rank) + " is missing";
  }
  return text;
}

Health::Health(c10::intrusive_ptr<::c10d::Store> store, const HealthOptions& options)
    : state_(std::make_shared<State>()) {
  HS_CHECK(store != nullptr, "comm.health: the store is null");
  State& state = *state_;
  state.store = std::move(store);
  state.options = options;
  if (options.heartbeat_s <= 0) {
    state.options.heartbeat_s = static_cast<double>(env::get_duration_ms("HS_HEARTBEAT_MS")) * 1e-3;
  }
  {
    std::unique_lock lock(state.mutex);
    state.round(lock);
    if (!state.store_error.empty()) {
      HS_FAIL(CommError, "comm.health: the job's store does not answer: ", state.store_error);
    }
  }
  // Keys must exist before anybody reads them, and must not undo what came first.
  state.store->compareSet(kFailureKey, to_bytes(""), to_bytes(""));
  state.store->add(kFinishedKey, 0);
  state.store->add(kLeftKey, 0);
  state.thread = std::thread([shared = state_] { shared->run(); });
}

Health::~Health() {
  std::unique_lock lock(state_->mutex);
  state_->is_stopping = true;
  state_->wake.notify_all();
  const double patience_s = std::max(1.0, 2 * state_->options.heartbeat_s);
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
  State& state = *health->state_;
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
  const State& state = *state_;
  const std::lock_guard lock(state.mutex);
  // Silence alone is no verdict: a stopped rank may go on. That is what the timeout is for.
  if (state.first_failure && state.first_failure->rank != state.options.rank) {
    return state.cause(group, stall);
  }
  return state.mismatch(group, stall);
}

std::string Health::explain(const GroupInfo& group, const Stall& stall) {
  const Watch watch(this, group.global_ranks);
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  const double deadline_s = now_s() + (kSilentBeats + 1) * state.options.heartbeat_s;
  std::optional<std::string> cause;
  while (true) {
    state.request(lock, std::max(0.0, deadline_s - now_s()));
    cause = state.cause(group, stall);
    if (cause || !state.store_error.empty() || state.store_hangs() || now_s() >= deadline_s) {
      break;
    }
    state.changed.wait_for(lock, std::chrono::duration<double>(0.25 * state.options.heartbeat_s));
  }
  if (cause) {
    return *cause;
  }
  if (!state.store_error.empty()) {
    return state.options.store_owner + " is gone; " + to_text(stall.note) + " cannot complete";
  }
  if (state.store_hangs()) {
    return state.options.store_owner + " does not answer (stopped, or cut off); " +
           to_text(stall.note) + " cannot complete";
  }
  return state.lag_text(group, stall);
}

void Health::report_failure(std::string_view text) {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  if (state.own.status > Status::kFinished) {
    return;
  }
  state.own.status = Status::kFailed;
  state.own_failure = text.empty() ? "no reason given" : text;
  state.request(lock, 2 * state.options.heartbeat_s);
}

// Polls quickly at first: ranks of a healthy job end within milliseconds of each other.
void Health::finish(double timeout_s) {
  State& state = *state_;
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
  state.own.status = Status::kFinished;
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
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  if (state.own.status <= Status::kFinished) {
    state.own.status = Status::kLeft;
    state.request(lock, 2 * state.options.heartbeat_s);
  }
  state.is_stopping = true;
  state.wake.notify_all();
}

void Health::linger(double seconds) {
  const Watch watch(this, {});
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  const double deadline_s = now_s() + seconds;
  while (now_s() < deadline_s && state.store_error.empty() && !state.has_ended) {
    state.request(lock, std::max(0.0, deadline_s - now_s()));
    const std::int64_t num_others_left = state.num_left - (state.is_left_counted ? 1 : 0);
    if (num_others_left >= state.options.world_size - 1) {
      return;
    }
    state.changed.wait_for(lock, std::chrono::duration<double>(0.1 * state.options.heartbeat_s));
  }
}

}  // namespace hypershard::comm
