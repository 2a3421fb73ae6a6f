// The thread that talks to the store, and the form in which ranks tell each other how they are.
#include "hypershard/comm/c10d/internal/health_state.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <string_view>
#include <utility>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "hypershard/comm/c10d/internal/backend_text.h"
#include "hypershard/comm/c10d/internal/quiet_store.h"
#include "hypershard/core/clock.h"

namespace hypershard::comm::internal {
namespace {

// A round with the store that takes so many heartbeats hangs.
constexpr double kHangingBeats = 2;
// All ranks are read in jobs up to this size, else only those of the stalled group.
constexpr int kReadAllUpTo = 256;
constexpr char kSeparator = '\x1f';
constexpr const char* kFailureKey = "health/failure";
constexpr const char* kFinishedKey = "health/finished";
constexpr const char* kLeftKey = "health/left";

std::string key_of(int rank) {
  return "health/" + std::to_string(rank);
}

std::string encode(const HealthRecord& record) {
  const CollectiveNote& note = record.note;
  std::string text = std::to_string(record.counter);
  for (const std::string& field :
       {std::to_string(static_cast<int>(record.status)),
        note.communicator,
        note.op,
        note.unit,
        std::to_string(note.sequence),
        std::to_string(note.signature),
        note.detail,
        std::to_string(static_cast<int>(note.crosses_supernodes))}) {
    text += kSeparator + field;
  }
  return text;
}

std::uint64_t number(std::string_view text) {
  std::uint64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

HealthRecord decode(std::string_view text) {
  std::string_view fields[9];
  for (std::string_view& field : fields) {
    const std::size_t end = text.find(kSeparator);
    field = text.substr(0, end);
    text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
  }
  HealthRecord record;
  record.counter = number(fields[0]);
  record.status = static_cast<HealthStatus>(number(fields[1]));
  record.note.communicator = fields[2];
  record.note.op = fields[3];
  record.note.unit = fields[4];
  record.note.sequence = number(fields[5]);
  record.note.signature = number(fields[6]);
  record.note.detail = fields[7];
  record.note.crosses_supernodes = number(fields[8]) != 0;
  return record;
}

std::vector<std::uint8_t> to_bytes(std::string_view text) {
  return {text.begin(), text.end()};
}

}  // namespace

HealthState::HealthState(
    c10::intrusive_ptr<::c10d::Store> health_store, const HealthOptions& health_options
)
    : store(std::move(health_store)), options(health_options) {}

void HealthState::create_keys() {
  const QuietStore quiet;
  store->compareSet(kFailureKey, to_bytes(""), to_bytes(""));
  store->add(kFinishedKey, 0);
  store->add(kLeftKey, 0);
}

std::vector<int> HealthState::ranks_to_read() const {
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

void HealthState::take(
    const std::vector<int>& ranks, const std::vector<std::vector<std::uint8_t>>& values
) {
  const double now = now_s();
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    HealthPeer& peer = peers[ranks[i]];
    const HealthRecord record = decode(std::string(values[i].begin(), values[i].end()));
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

void HealthState::round(std::unique_lock<std::mutex>& lock) {
  ++own.counter;
  const std::string record = encode(own);
  const std::string failure = std::exchange(own_failure, {});
  const std::vector<int> ranks = ranks_to_read();
  const bool counts_finished = own.status == HealthStatus::kFinished && !is_finished_counted;
  const bool counts_left = own.status > HealthStatus::kFinished && !is_left_counted;
  is_finished_counted = is_finished_counted || counts_finished;
  is_left_counted = is_left_counted || counts_left;
  const bool reads = !watches.empty();
  in_round = true;
  round_start_s = now_s();
  lock.unlock();
  std::vector<std::vector<std::uint8_t>> values;
  std::string error_text;
  try {
    const QuietStore quiet;
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
    error_text = backend_text(error);
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

void HealthState::run() {
  std::unique_lock lock(mutex);
  // A store that has failed once stays failed: its client does not connect again.
  while (!is_stopping && store_error.empty()) {
    wake.wait_for(lock, std::chrono::duration<double>(options.heartbeat_s), [&] {
      return is_stopping || has_request;
    });
    has_request = false;
    if (!is_stopping || (own.status > HealthStatus::kFinished && !is_left_counted)) {
      round(lock);
    }
  }
  has_ended = true;
  changed.notify_all();
}

void HealthState::request(std::unique_lock<std::mutex>& lock, double seconds) {
  if (store_hangs()) {
    return;
  }
  const std::uint64_t wanted = num_rounds + (in_round ? 2 : 1);
  has_request = true;
  wake.notify_all();
  changed.wait_for(lock, std::chrono::duration<double>(seconds), [&] {
    return num_rounds >= wanted || has_ended;
  });
}

bool HealthState::store_hangs() const {
  return in_round && now_s() - round_start_s >= kHangingBeats * options.heartbeat_s;
}

}  // namespace hypershard::comm::internal
