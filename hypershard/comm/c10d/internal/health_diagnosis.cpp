// From what is known of the ranks to the sentence that the user reads.
#include <algorithm>
#include <utility>

#include "hypershard/comm/c10d/internal/health_state.h"

namespace hypershard::comm::internal {
namespace {

// A rank counts as silent after so many heartbeats without a new one ...
constexpr double kSilentBeats = 2;
// ... or so many, if there was time to hear them: a busy host may delay one or two ...
constexpr double kSurelySilentBeats = 4;
// ... and is named if it has been silent for this share of the longest silence.
constexpr double kAsSilent = 0.75;

std::string seconds_text(double seconds) {
  const auto tenths = static_cast<long long>(seconds * 10 + 0.5);
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " s";
}

std::string last_collective(const CollectiveNote& note) {
  return note.communicator.empty() ? "it has told of no collective yet"
                                   : "its last known collective was " + to_text(note);
}

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size() && i < 16; ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return ranks.size() > 16 ? text + ", ... (" + std::to_string(ranks.size()) + " in all)" : text;
}

}  // namespace

std::vector<int> HealthState::silent_ranks(const std::vector<int>& ranks, const Stall& stall)
    const {
  const bool had_time =
      stall.timed_out && stall.waited_s >= 2 * kSurelySilentBeats * options.heartbeat_s;
  const double silent_s = (had_time ? kSurelySilentBeats : kSilentBeats) * options.heartbeat_s;
  std::vector<std::pair<double, int>> silent;
  for (const int rank : ranks) {
    const auto found = peers.find(rank);
    if (found == peers.end() || !found->second.is_seen ||
        found->second.record.status > HealthStatus::kFinished) {
      continue;
    }
    const double silence_s = last_read_s - found->second.changed_s;
    if (silence_s >= silent_s) {
      silent.emplace_back(-silence_s, rank);
    }
  }
  std::sort(silent.begin(), silent.end());
  std::vector<int> worst;
  for (const auto& [negated_s, rank] : silent) {
    if (negated_s <= kAsSilent * silent.front().first) {
      worst.push_back(rank);
    }
  }
  return worst;
}

std::string HealthState::silent_text(const std::vector<int>& silent, const Stall& stall) const {
  const HealthPeer& first = peers.at(silent.front());
  const bool is_closed = !stall.timed_out && !stall.transport_text.empty();
  std::string text = ranks_text(silent);
  if (is_closed) {
    text += " died";
  } else {
    text += silent.size() == 1 ? " has died or is stopped" : " have died or are stopped";
    text += stall.note.crosses_supernodes ? ", or cut off" : "";
  }
  text += " (no sign of life for " + seconds_text(last_read_s - first.changed_s) + ")";
  text += " during " + to_text(stall.note) + "; ";
  text += silent.size() == 1 ? "" : ranks_text({silent.front()}) + ": ";
  return text + last_collective(first.record.note);
}

std::optional<std::string> HealthState::mismatch(const GroupInfo& group, const Stall& stall) const {
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

std::optional<std::string> HealthState::cause(const GroupInfo& group, const Stall& stall) const {
  std::vector<int> others;
  for (const auto& [rank, peer] : peers) {
    others.push_back(rank);
  }
  std::vector<int> silent = silent_ranks(group.global_ranks, stall);
  silent = silent.empty() ? silent_ranks(others, stall) : silent;
  if (!silent.empty()) {
    return silent_text(silent, stall);
  }
  if (first_failure && first_failure->rank != options.rank) {
    return "rank " + std::to_string(first_failure->rank) + " failed first, so " +
           to_text(stall.note) + " cannot complete; it said: " + first_failure->text;
  }
  // Before who has failed: that may be why, seen by the other one first.
  if (std::optional<std::string> text = mismatch(group, stall)) {
    return text;
  }
  for (const int rank : group.global_ranks) {
    const auto found = peers.find(rank);
    if (found == peers.end() || found->second.record.status <= HealthStatus::kFinished) {
      continue;
    }
    const bool has_left = found->second.record.status == HealthStatus::kLeft;
    return "rank " + std::to_string(rank) + (has_left ? " has ended its job" : " failed") +
           " before " + to_text(stall.note) + "; " + last_collective(found->second.record.note);
  }
  return std::nullopt;
}

std::string HealthState::lag_text(const GroupInfo& group, const Stall& stall) const {
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
                             ? found->second.record.status == HealthStatus::kFinished
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

int HealthState::num_others_gone() const {
  std::vector<int> others;
  for (const auto& [rank, peer] : peers) {
    if (peer.record.status <= HealthStatus::kFinished) {
      others.push_back(rank);
    }
  }
  const auto num_silent = static_cast<int>(silent_ranks(others, Stall()).size());
  const auto num_others_left = static_cast<int>(num_left) - (is_left_counted ? 1 : 0);
  return num_others_left + num_silent;
}

std::string HealthState::conclusion(const GroupInfo& group, const Stall& stall) const {
  if (const auto known = cause(group, stall)) {
    return *known;
  }
  if (!store_error.empty()) {
    return options.store_owner + " is gone; " + to_text(stall.note) + " cannot complete";
  }
  if (store_hangs()) {
    return options.store_owner + " does not answer (stopped, or cut off); " + to_text(stall.note) +
           " cannot complete";
  }
  return lag_text(group, stall);
}

}  // namespace hypershard::comm::internal
