// A unit: what is unsharded together, normally one transformer block.
// It carries its groups through unshard, reshard and reduction; when that happens is the engine's
// business.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "hypershard/core/trace.h"
#include "hypershard/shard/buffer_pool.h"
#include "hypershard/shard/gradient_buffers.h"
#include "hypershard/shard/group.h"
#include "hypershard/shard/shared_unit_pool.h"
#include "hypershard/shard/staged_work.h"
#include "hypershard/shard/unit_reduction.h"

namespace hypershard::shard {

/// Whether a unit's parameters can be read.
enum class UnitState : std::uint8_t { kSharded, kUnsharding, kUnsharded };

/// What a unit went through since the last backward ended; see NOTE [when a unit posts].
struct Occurrences {
  int plain = 0;                ///< forwards that keep activations
  int in_segments = 0;          ///< forwards inside a recompute segment
  int segments_left = 0;        ///< of those, backward not yet done
  bool holds_segments = false;  ///< a recompute segment began inside this unit's forward
  std::vector<std::int64_t> segment_marks;  ///< per running forward: segments started before it
};

/// One unit on one rank. Owned by the engine; threads: the rank's.
class Unit {
 public:
  Unit(
      int index,
      std::string path,
      bool is_root,
      std::vector<std::unique_ptr<ParamGroup>> groups,
      BufferPool* pool,
      Counters* counters
  );

  int index() const { return index_; }
  const std::string& path() const { return path_; }
  bool is_root() const { return is_root_; }
  const std::vector<std::unique_ptr<ParamGroup>>& groups() const { return groups_; }
  UnitState state() const { return state_; }
  /// Bytes of the buffer in which the groups of a mode are made whole.
  std::int64_t whole_bytes(RuntimeMode mode) const;
  /// Where groups of kPooled are made whole; to be called once, before any is.
  void set_shared_pool(SharedUnitPool* pool) { shared_pool_ = pool; }
  bool has_trainable() const;
  bool has_frozen() const;
  /// Tells whether some group lies in memory that other ranks write.
  bool shares_memory() const;

  // --- parameters
  /// Starts to make the unit whole; nothing if it is or is under way.
  void start_unshard();
  /// Waits until it is whole and puts the memory under its parameters.
  void finish_unshard();
  /// Takes the memory away; the unit must be whole.
  void reshard();
  /// Drives an unshard without blocking; true once finish_unshard() would not wait.
  bool advance_unshard() { return !unshard_ || unshard_->test(); }

  // --- publishing; see NOTE [publishing]
  /// Writes this rank's part of the runtime parameters from its update parameters, of groups that
  /// have anything new; see ParamGroup::write_runtime. Returns whether some had.
  bool write_runtime(bool even_frozen);
  /// Starts to gather what other ranks' update parameters say of it.
  comm::WorkPtr start_publish();
  /// Bytes of its runtime parameters on this rank, and of its sums, that cross supernodes to be
  /// gathered and scattered there. Equal on all ranks of the plan axes.
  std::int64_t publish_bytes() const;
  std::int64_t crossing_bytes() const;

  // --- gradients
  std::int64_t gradient_bytes() const;
  /// Bytes of a buffer for the sums that cross supernodes, 0 if there are none.
  std::int64_t slice_bytes(const ReduceOptions& options) const;
  bool has_gradients() const { return has_gradients_; }
  /// Takes a buffer for the gradients of this accumulation; `held` makes it private, for
  /// micro-batches without reduction.
  void take_gradient_buffer(GradientBuffers& buffers, bool held);
  /// Starts the reduction and gives the buffer back; `slices` are for sums that cross supernodes.
  std::shared_ptr<UnitReduction> start_reduce(
      GradientBuffers& buffers, GradientBuffers& slices, const ReduceOptions& options
  );
  void forget_gradients(GradientBuffers& buffers);

  // --- one iteration, kept by the engine
  bool reshard_after_forward = true;
  bool pinned = false;      ///< unsharded by hand: the engine leaves it so
  bool prefetched = false;  ///< unshard started ahead of need
  bool used = false;        ///< forward ran in this pass
  bool ready = false;       ///< every gradient of this backward is written
  bool reduced = false;     ///< reduction started
  int pending = 0;          ///< trainable parameters whose gradient has not come
  Occurrences occurrences;
  OpenSpan backward_span;
  std::uint64_t backward_flow = 0;  ///< names the arrow from its last backward to its reduction

 private:
  void start_gathers();

  int index_;
  std::string path_;
  bool is_root_;
  std::vector<std::unique_ptr<ParamGroup>> groups_;
  BufferPool* pool_;
  SharedUnitPool* shared_pool_ = nullptr;
  Counters* counters_;

  UnitState state_ = UnitState::kSharded;
  const SharedUnitPool::Buffer* shared_buffer_ = nullptr;
  at::Tensor compute_buffer_;
  at::Tensor storage_buffer_;
  OpenSpan unshard_span_;
  std::shared_ptr<WorkSet> unshard_;  // kept until reshard: peers may read from our buffer

  bool has_gradients_ = false;
  GradientBuffers::Buffer* buffer_ = nullptr;
  at::Tensor held_;  // private buffer of micro-batches without reduction; kept once allocated
  // What last read it, or a gradient plane used as buffer.
  std::shared_ptr<UnitReduction> held_last_;
};

}  // namespace hypershard::shard
