// Memory that the ranks of one supernode share, and the counters that order its readers and
// writers. This is what makes a gather move no bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace hypershard::comm {

/// One buffer, mapped by every rank of a communicator.
///
/// Two mappings of the same pages: `read()` for kernels (read-only pages where the back end can, so
/// that a stray write faults), `write()` for the owner of a range. Zero-filled at birth. Freed when
/// the last rank's handle dies; nothing stays behind after a crash. Threads: the addresses may be
/// used from any thread; ordering between ranks is the user's (EpochBoard).
class SharedBuffer {
 public:
  virtual ~SharedBuffer() = default;
  virtual const std::byte* read() const = 0;
  virtual std::byte* write() const = 0;
  virtual std::int64_t bytes() const = 0;
};

/// One region a rank, each readable by all ranks of the communicator.
///
/// A collective whose input lies inside this rank's region is read there in place by the peers (no
/// staging copy); such an input may be written again only after Work::wait_released(). Zero-filled
/// at birth.
class SymmetricArena {
 public:
  virtual ~SymmetricArena() = default;
  /// Returns this rank's own region, writable.
  virtual std::byte* local() const = 0;
  /// Returns the region of `peer` (a rank of the communicator) as mapped here, read-only.
  virtual const std::byte* peer(int rank) const = 0;
  virtual std::int64_t bytes() const = 0;
};

/// Rows of monotonic counters, one column a rank: "rank r has reached epoch e in row s".
///
/// Release on publish, acquire on wait, so that what a rank wrote before publish(s, e) is seen
/// after wait_all(s, e).
class EpochBoard {
 public:
  virtual ~EpochBoard() = default;
  virtual int num_rows() const = 0;
  /// Raises this rank's counter in `row` to `epoch` (never lowers it) and wakes waiters.
  virtual void publish(int row, std::uint64_t epoch) = 0;
  /// Returns true if every rank has reached `epoch` in `row`.
  virtual bool reached(int row, std::uint64_t epoch) const = 0;
  /// Blocks until every rank has reached `epoch` in `row`; `what` and `unit` go into the error.
  /// Errors: CommError naming the ranks that lag or died, after the communicator's timeout.
  virtual void wait_all(
      int row, std::uint64_t epoch, std::string_view what, std::string_view unit
  ) = 0;
};

}  // namespace hypershard::comm
