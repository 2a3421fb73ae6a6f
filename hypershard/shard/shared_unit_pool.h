// Buffers of unsharded units that the ranks of a supernode share: what comes from another supernode
// is brought in once, each rank its part, and lies there once.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/comm/communicator.h"
#include "hypershard/shard/counters.h"

namespace hypershard::shard {

/// Pool of buffers that are mapped by all ranks of one communicator.
///
/// NOTE [shared unit buffers]: all ranks acquire for the same units in the same order (NOTE [order
/// of collectives]); the n-th acquire of each is ticket n. Which buffer a ticket gets is settled by
/// the rank that comes first, without a lock: it takes the lowest free one and enters it in a table
/// where the others find it. So timing decides where a unit lies, never what lies there. A buffer
/// is free again once every rank has released it; a unit may be read once every rank has landed its
/// part. A unit has at most two tickets open, since nobody can complete its next before everybody
/// has begun it: there is room for that, and pages come only when a buffer is used.
///
/// Life cycle: a collective constructor, then for each unshard of a unit acquire, land, release.
/// Memory: alive as long as the pool or a tensor of it. Threads: the rank's.
class SharedUnitPool {
 public:
  /// `unit_bytes` by unit, 0 for those that need none. Collective: ranks of `ranks`, which must
  /// have shared memory. Errors: CommError if a rank cannot allocate.
  SharedUnitPool(
      comm::Communicator& ranks,
      const std::vector<std::int64_t>& unit_bytes,
      Counters* counters,
      bool poison
  );

  /// One buffer, 1-D uint8, as this rank writes it and as its kernels read it.
  struct Buffer {
    at::Tensor write;
    at::Tensor read;
    std::size_t slot = 0;
  };

  /// Returns the buffer of a unit's next unshard; contents undefined (zero or NaN bytes when
  /// poisoning). Never waits. Errors: InternalError if ranks acquire in different orders.
  const Buffer& acquire(int unit);
  /// Says that this rank's part is there; the work is done when that is so on all ranks. Works must
  /// be made in the same order on all ranks. Errors: CommError from wait(), naming ranks that lag.
  comm::WorkPtr land(std::string unit);
  /// Ends this rank's use of a buffer.
  void release(const Buffer& buffer);

  /// Returns the bytes of all buffers that were ever used, of which the supernode holds one copy.
  std::int64_t used_bytes() const { return used_bytes_; }

 private:
  struct SizeClass {
    std::int64_t bytes = 0;
    std::size_t first_slot = 0;
    std::size_t num_slots = 0;
  };
  std::size_t slot_of(std::uint64_t ticket, const SizeClass& size);
  std::size_t claim(std::uint64_t ticket, const SizeClass& size, std::uint64_t entry_before);
  void make_buffers(const std::shared_ptr<comm::SharedBuffer>& memory);
  std::int64_t own_share(std::int64_t bytes) const;
  std::uint64_t& entry(std::uint64_t ticket) const;  // see NOTE [shared unit buffers]: the table
  std::uint64_t& holder(std::size_t slot) const;     // the ticket that has a buffer, 0 if none has
  std::uint64_t& num_released(std::size_t slot) const;

  Counters* counters_;
  bool poison_;
  std::uint64_t num_ranks_;
  std::int64_t rank_;
  std::vector<SizeClass> sizes_;
  std::vector<std::size_t> size_of_;  // by unit
  std::size_t num_entries_ = 0;
  std::size_t num_slots_ = 0;
  std::shared_ptr<comm::SharedBuffer> words_;  // table, holders, releases
  std::shared_ptr<comm::EpochBoard> landed_;
  std::vector<Buffer> buffers_;  // by slot
  std::vector<bool> was_used_;   // by slot
  std::int64_t used_bytes_ = 0;
  std::uint64_t num_tickets_ = 0;
  std::uint64_t num_landings_ = 0;
};

}  // namespace hypershard::shard
