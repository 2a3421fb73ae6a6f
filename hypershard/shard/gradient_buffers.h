// The buffers that unsharded gradients are written to: few, allocated once, handed from unit to
// unit. Their number bounds how far a rank may run ahead of its peers.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/comm/communicator.h"
#include "hypershard/shard/counters.h"

namespace hypershard::shard {

/// Gradient buffers by size, in memory that peers can read in place where there is such memory.
///
/// Life of a buffer: acquire() by a unit; written in backward; release(work) when its reduction has
/// been started; free again once that work's wait_released() returns, which the next acquire() of
/// it sees to. Threads: the rank's thread.
class GradientBuffers {
 public:
  struct Buffer {
    at::Tensor bytes;  ///< 1-D uint8
    comm::WorkPtr last;
    bool busy = false;
  };

  /// Allocates for units of these sizes: `depth` buffers for a size that several units share, else
  /// one each. Collective: ranks of `reader` if it has shared memory. `drive` must finish every
  /// reduction up to the work it is given.
  /// Errors: InvalidArgument if depth < 1; CommError if a rank cannot allocate.
  GradientBuffers(
      const std::vector<std::int64_t>& unit_bytes,
      int depth,
      comm::Communicator* reader,
      Counters* counters,
      std::function<void(const comm::WorkPtr&)> drive
  );

  /// Returns a free buffer of `bytes`, after waiting until peers have read what it held; adds one
  /// if all are busy.
  Buffer* acquire(std::int64_t bytes);
  /// Gives a buffer back; `reduction` still reads it.
  void release(Buffer* buffer, comm::WorkPtr reduction);

 private:
  using Row = std::vector<std::unique_ptr<Buffer>>;
  Row& row(std::int64_t bytes) { return rows_[bytes]; }
  void add_private(Row& row, std::int64_t bytes);

  Counters* counters_;
  std::function<void(const comm::WorkPtr&)> drive_;
  std::shared_ptr<comm::SymmetricArena> arena_;
  std::map<std::int64_t, Row> rows_;
};

}  // namespace hypershard::shard
