// Why: how a collective is cut into pieces is pure arithmetic; writer and readers must agree on it
// to the element, so it is written down once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/comm/communicator.h"
#include "hypershard/comm/shm/internal/control_block.h"

namespace hypershard::comm::internal {

/// Sizes that all ranks of a group must share.
struct SharedOptions {
  std::int64_t staging_bytes = std::int64_t{8} << 20;  ///< a rank
  std::int64_t step_bytes = std::int64_t{1} << 20;     ///< staged at once
  /// An all-reduce up to this size is staged wherever it lies, so that its tensor is free at once.
  std::int64_t small_bytes = std::int64_t{32} << 10;
  /// An all-reduce up to this size is computed by every rank for itself: one meeting, not two.
  std::int64_t tiny_bytes = std::int64_t{4} << 10;
};

/// A validated call, as back ends over shared memory take it.
struct SharedCall {
  Op op = Op::kBarrier;
  at::Tensor output;
  at::Tensor input;
  std::vector<std::int64_t> output_counts;
  std::vector<std::int64_t> input_counts;
  Reduction reduce;
  int root = 0;
  std::string unit;
};

/// A run of elements of one source's tensor, in elements.
struct Piece {
  std::int64_t offset = 0;  ///< within the source's input
  std::int64_t numel = 0;
  std::int64_t in_step = 0;  ///< within the staged step
};

/// The arithmetic of one call, equal on all ranks but for `counts` of an all-to-all.
///
/// NOTE [steps]
/// A staged input is copied in steps. Step c of a reduce-scatter or all-to-all holds the c-th run
/// of every destination's slice but the writer's own; of an all-gather or broadcast the c-th run
/// of the slice; of an all-reduce the c-th run of the tensor, of which every rank owns a part.
class Cut {
 public:
  Cut() = default;
  Cut(Op op, int size, std::int64_t numel, std::int64_t element_bytes, const SharedOptions& options
  );

  /// Returns how many steps `source` needs to stage its input; `counts` are its own.
  std::int64_t num_steps(const std::int64_t* counts, int source) const;
  /// Returns the elements of step `step` of `source`.
  std::int64_t step_numel(const std::int64_t* counts, int source, std::int64_t step) const;
  /// Returns what `reader` takes of `source` in step `step`.
  Piece piece(const std::int64_t* counts, int source, int reader, std::int64_t step) const;
  /// Returns all that `reader` takes of `source` when the input is read where it lies.
  Piece whole(const std::int64_t* counts, int source, int reader) const;
  /// Returns elements of a slice that one step covers.
  std::int64_t run() const { return run_; }
  /// Tells whether an all-reduce is computed by every rank for itself.
  bool tiny() const { return tiny_; }

 private:
  std::int64_t slice_run(const std::int64_t* counts, int reader, std::int64_t step) const;

  Op op_ = Op::kBarrier;
  int size_ = 1;
  std::int64_t numel_ = 0;
  std::int64_t run_ = 1;
  bool tiny_ = false;
};

}  // namespace hypershard::comm::internal
