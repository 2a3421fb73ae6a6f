// Why: the shared-memory algorithm is one; how ranks come to see the same memory differs. Threads
// hand out pointers (local), processes map pages of each other (shm).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/comm/arena.h"

namespace hypershard::comm::internal {

/// What an allocation is for, which decides how its pages come to be.
enum class RegionUse {
  kControl,  ///< small; counters and staging, mapped once, pages on first touch
  kData,     ///< tensors: reserved at once, mapped read-only and writable
  kSparse,   ///< the same, but pages on first touch
};

/// One rank's end of a group's memory.
///
/// Threads: the rank's own.
class RegionSource {
 public:
  virtual ~RegionSource() = default;

  /// Names the back end in messages: `local`, `shm`.
  virtual std::string name() const = 0;

  /// Allocates zeroed memory that all ranks of the group see.
  ///
  /// `progress` is called while the call waits for peers. A one-rank group never waits.
  /// Collective: all ranks, equal `bytes` and `what`, in one order.
  /// Errors: CommError if a rank cannot allocate, asks for something else, dies or does not come.
  virtual std::shared_ptr<SharedBuffer> allocate(
      std::int64_t bytes,
      std::string_view what,
      RegionUse use,
      const std::function<void()>& progress
  ) = 0;

  /// Tells whether peers can read any memory of this rank by its address.
  virtual bool reads_any_memory() const = 0;

  /// Returns the peers whose processes are gone. Costs a system call at most.
  virtual std::vector<int> lost_peers() = 0;

  /// Begins to look what else in the job may hold up a wait that is long; null if there is nobody
  /// to ask. The result is called once the wait has timed out.
  virtual std::function<std::string()> watch_stall(std::string /*during*/) { return nullptr; }

  /// Keeps tensors that peers may still be reading, until all of them have left.
  virtual void keep(std::vector<at::Tensor> tensors) = 0;
};

}  // namespace hypershard::comm::internal
