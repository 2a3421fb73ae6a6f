// Why: the words through which the ranks of a group talk: who has called what, how far each one is,
// who sleeps, what went wrong. Laid out by hand because processes map it at different addresses.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace hypershard::comm::internal {

/// Calls that a rank may be ahead of the slowest reader.
inline constexpr std::uint64_t kCallRing = 256;
/// Staged steps that a rank may have in flight.
inline constexpr std::uint64_t kStepRing = 64;
inline constexpr std::size_t kUnitText = 56;
inline constexpr std::size_t kFailureText = 1024;

/// Where a call's input lies for the peers.
enum class Place : std::uint32_t {
  kNone,     ///< there is none
  kStaged,   ///< in steps, in this rank's staging area
  kRegion,   ///< at `address` bytes into the shared region number `region`
  kAddress,  ///< at `address` itself (ranks are threads)
};

/// One call as its rank posted it. Written before `posted` passes it, then constant until every
/// rank has finished the call.
struct CallRecord {
  std::uint64_t sequence;
  std::uint64_t unit_hash;
  std::uint64_t address;
  std::uint64_t first_step;  ///< number of its first staged step, in its rank's own count
  std::int64_t num_steps;    ///< staged steps; 0 unless `place` is kStaged
  std::int64_t numel;        ///< of the whole tensor
  double divisor;            ///< of a reduction
  std::uint32_t region;
  Place place;
  std::int32_t root;
  std::uint8_t op;
  std::uint8_t dtype;
  std::uint8_t reduce;
  std::uint8_t wire;     ///< of a reduction, Undefined if values are not rounded
  char unit[kUnitText];  ///< cut to fit, with a zero at its end
};

/// How far one rank is. Every counter only grows and is written by its rank alone.
///
/// NOTE [who waits for which counter]
/// `posted`    calls whose record and input may be read
/// `ready`     staged steps whose bytes may be read
/// `reduced`   pieces of all-reduces whose result may be read
/// `finished`  calls after which this rank reads nothing of its peers any more
struct alignas(64) RankCounters {
  std::atomic<std::uint64_t> posted;
  std::atomic<std::uint64_t> ready;
  std::atomic<std::uint64_t> reduced;
  std::atomic<std::uint64_t> finished;
  std::atomic<std::uint32_t> left;              ///< 1 once the rank's communicator is gone
  alignas(64) std::atomic<std::uint32_t> bell;  ///< its rank sleeps on it; peers ring it
};

/// The first failure; all ranks of the group throw its text from then on.
struct FailureRecord {
  std::atomic<std::uint32_t> state;  ///< 0 none, 1 being written, 2 to be read
  std::int32_t rank;
  char text[kFailureText];
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

/// Addresses of the parts of a control block in this process; zeroed memory is a valid block.
class ControlBlock {
 public:
  ControlBlock() = default;
  ControlBlock(std::byte* base, int size);
  static std::int64_t bytes(int size);

  int size() const { return size_; }
  RankCounters& counters(int rank) const { return counters_[rank]; }
  FailureRecord& failure() const { return *failure_; }
  /// Which ranks `rank` wants to be woken by while it sleeps: one bit each, modulo 64.
  std::atomic<std::uint64_t>& interest(int rank) const { return interest_[rank]; }
  /// Steps of `source`'s staging that `reader` is done with.
  std::atomic<std::uint64_t>& consumed(int reader, int source) const {
    return consumed_[static_cast<std::int64_t>(reader) * row_ + source];
  }
  CallRecord& record(int rank, std::uint64_t sequence) const {
    return records_[static_cast<std::uint64_t>(rank) * kCallRing + sequence % kCallRing];
  }
  /// The call's counts, one a rank: output counts of an all-gather, else input counts.
  std::int64_t* counts(int rank, std::uint64_t sequence) const {
    const auto slot = static_cast<std::uint64_t>(rank) * kCallRing + sequence % kCallRing;
    return counts_ + slot * static_cast<std::uint64_t>(size_);
  }
  /// Where a step lies in the rank's staging area, in bytes.
  std::uint64_t& step_offset(int rank, std::uint64_t step) const {
    return step_offsets_[static_cast<std::uint64_t>(rank) * kStepRing + step % kStepRing];
  }

 private:
  int size_ = 0;
  std::int64_t row_ = 0;
  std::int64_t bytes_ = 0;
  FailureRecord* failure_ = nullptr;
  RankCounters* counters_ = nullptr;
  std::atomic<std::uint64_t>* interest_ = nullptr;
  std::atomic<std::uint64_t>* consumed_ = nullptr;
  std::uint64_t* step_offsets_ = nullptr;
  CallRecord* records_ = nullptr;
  std::int64_t* counts_ = nullptr;
};

}  // namespace hypershard::comm::internal
