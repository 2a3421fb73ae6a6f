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
#include "hypershard/shard/unit_reduction.h"

namespace hypershard::shard {

/// Gradient buffers by size, in memory that peers can read in place where there is such memory.
///
/// Life of a buffer: acquire() by a unit; written; release(reduction) when the reduction that reads
/// it has been started; free again once that reduction has left it and its peers have read it,
/// which the next acquire() sees to. Threads: the rank's thread.
class GradientBuffers {
 public:
  /// When a reduction is through with a buffer.
  enum class Until : std::uint8_t {
    kLeft,      ///< once its sums inside the supernode lie elsewhere, if they do
    kFinished,  ///< at its end
  };
  struct Buffer {
    at::Tensor bytes;  ///< 1-D uint8
    std::shared_ptr<UnitReduction> last;
    bool busy = false;
  };

  /// At most `depth` buffers for a size that several units share, else one each; in memory of
  /// `reader`, and then all at once, if it has shared memory, else one by one when needed.
  /// Collective: ranks of `reader` if it has shared memory. `drive` must bring the reduction it is
  /// given, and all before it, so far that its buffer may be written.
  /// Errors: InvalidArgument if depth < 1; CommError if a rank cannot allocate.
  GradientBuffers(
      const std::vector<std::int64_t>& unit_bytes,
      int depth,
      Until until,
      comm::Communicator* reader,
      Counters* counters,
      std::function<void(UnitReduction&)> drive
  );

  /// Returns a free buffer of `bytes`, after waiting until peers have read what it held; adds one
  /// if all are busy.
  Buffer* acquire(std::int64_t bytes);
  /// Gives a buffer back; `reduction` still reads it.
  void release(Buffer* buffer, std::shared_ptr<UnitReduction> reduction);

 private:
  using Row = std::vector<std::unique_ptr<Buffer>>;
  Row& row(std::int64_t bytes) { return rows_[bytes]; }
  Buffer* add_private(Row& row, std::int64_t bytes);
  bool may_wait_for(const Buffer& buffer) const;

  Until until_;
  Counters* counters_;
  std::function<void(UnitReduction&)> drive_;
  std::shared_ptr<comm::SymmetricArena> arena_;
  std::map<std::int64_t, Row> rows_;
  std::map<std::int64_t, int> depths_;  ///< by size: buffers there may be before one waits
};

}  // namespace hypershard::shard
