// Why: counts, bytes and a rolling hash of what a communicator started, so that tests can compare
// exact numbers and ranks can compare one word.
#include "hypershard/comm/collective_log.h"

#include <iterator>
#include <string_view>
#include <utility>

#include "hypershard/core/hash.h"
#include "hypershard/core/text.h"

namespace hypershard::comm {
namespace {

/// Hashes a text and its length: "ab", "c" differs from "a", "bc".
std::uint64_t hash_field(std::uint64_t hash, std::string_view text) {
  return hash_combine(hash_bytes(text, hash), text.size());
}

/// Hashes what must agree between ranks: not the bytes of an all-to-all, whose counts differ.
std::uint64_t hash_entry(std::uint64_t hash, const LogEntry& entry) {
  hash = hash_combine(hash, static_cast<std::uint64_t>(entry.op));
  hash = hash_field(hash, entry.communicator);
  hash = hash_field(hash, entry.unit);
  hash = hash_field(hash, entry.dtype);
  if (entry.op != Op::kAllToAll) {
    hash = hash_combine(hash, static_cast<std::uint64_t>(entry.payload_bytes));
  }
  return hash;
}

}  // namespace

std::string to_text(Op op) {
  switch (op) {
    case Op::kAllGather:
      return "all_gather";
    case Op::kReduceScatter:
      return "reduce_scatter";
    case Op::kAllReduce:
      return "all_reduce";
    case Op::kBroadcast:
      return "broadcast";
    case Op::kAllToAll:
      return "all_to_all";
    case Op::kBarrier:
      return "barrier";
  }
  return "unknown";
}

std::string to_text(const LogEntry& entry) {
  std::string text = to_text(entry.op) + concat_text(" #", entry.sequence);
  text += entry.unit.empty() ? "" : " for unit '" + entry.unit + "'";
  text += " on '" + entry.communicator + "'";
  if (entry.op != Op::kBarrier) {
    text += concat_text(" (", entry.dtype, ", ", entry.payload_bytes, " bytes)");
  }
  return text;
}

void CollectiveLog::append(LogEntry entry) {
  ++size_;
  hash_ = hash_entry(hash_, entry);
  bytes_[static_cast<std::size_t>(entry.op)] += entry.payload_bytes;
  ++counts_[static_cast<std::size_t>(entry.op)];
  entries_.push_back(std::move(entry));
  while (!keep_all_ && entries_.size() > keep_) {
    entries_.pop_front();
  }
}

void CollectiveLog::clear() {
  size_ = 0;
  hash_ = 0;
  entries_.clear();
  for (std::size_t op = 0; op < std::size(bytes_); ++op) {
    bytes_[op] = 0;
    counts_[op] = 0;
  }
}

}  // namespace hypershard::comm
