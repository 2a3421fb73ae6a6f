// A record of the collectives a communicator has started: the oracle of tests, the checksum of
// validation mode, and the last words of a rank that hangs.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

namespace hypershard::comm {

/// What a communicator can do.
enum class Op : std::uint8_t {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kBroadcast,
  kAllToAll,
  kBarrier
};
std::string to_text(Op op);

/// One collective as this rank started it.
struct LogEntry {
  std::uint64_t sequence = 0;  ///< 0, 1, 2 … within the communicator
  Op op = Op::kBarrier;
  std::string communicator;  ///< its name, normally the mesh axis
  std::string unit;          ///< what it was for, e.g. `blocks.3`
  std::string dtype;
  std::int64_t payload_bytes =
      0;  ///< bytes of the whole tensor (gathered, or before reduction) on this rank
  bool operator==(const LogEntry&) const = default;
};
std::string to_text(const LogEntry& entry);

/// Keeps counts and a rolling hash of everything, and the newest entries.
/// Threads: not thread-safe; one log a communicator, written by its thread.
class CollectiveLog {
 public:
  explicit CollectiveLog(std::size_t keep = 256) : keep_(keep) {}
  /// Adds an entry to counts, bytes and hash.
  void append(LogEntry entry);
  /// Keeps every entry from now on (tests, validation mode).
  void keep_all(bool on) { keep_all_ = on; }
  void clear();

  std::uint64_t size() const { return size_; }
  std::uint64_t hash() const { return hash_; }
  std::int64_t bytes(Op op) const { return bytes_[static_cast<std::size_t>(op)]; }
  std::int64_t count(Op op) const { return counts_[static_cast<std::size_t>(op)]; }
  /// Returns the entries kept, oldest first.
  std::vector<LogEntry> entries() const { return {entries_.begin(), entries_.end()}; }

 private:
  std::size_t keep_;
  bool keep_all_ = false;
  std::uint64_t size_ = 0;
  std::uint64_t hash_ = 0;
  std::int64_t bytes_[6] = {};
  std::int64_t counts_[6] = {};
  std::deque<LogEntry> entries_;
};

}  // namespace hypershard::comm
