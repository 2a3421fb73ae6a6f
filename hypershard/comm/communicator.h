// Collectives on plain tensors over one group of ranks: the one interface that all back ends
// implement. The engine, the optimizers and the plans talk to ranks through this class only.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/comm/arena.h"
#include "hypershard/comm/collective_log.h"
#include "hypershard/comm/work.h"
#include "hypershard/layout/mesh.h"

namespace hypershard::comm {

/// How values of several ranks are joined. There is no average: sum, then divide where it is
/// documented.
enum class ReduceOp : std::uint8_t { kSum, kMax, kMin };
std::string to_text(ReduceOp op);

/// A join, and what its result is divided by.
///
/// The division comes once, after all values are joined, in the dtype of the accumulation and
/// before the result is rounded to the output's dtype; it costs no pass over memory of its own.
struct Reduction {
  ReduceOp op = ReduceOp::kSum;
  double divisor = 1;  ///< equal on all ranks; 1 divides nothing
  // NOLINTNEXTLINE(google-explicit-constructor): most reductions are no more than their operation
  Reduction(ReduceOp join = ReduceOp::kSum, double divide_by = 1) : op(join), divisor(divide_by) {}
};

/// Who a communicator joins.
struct GroupInfo {
  std::string name;               ///< mesh axis or `world`; part of every message
  std::vector<int> global_ranks;  ///< position = rank in the communicator
  int rank = 0;                   ///< this process's position
  layout::Tier tier = layout::Tier::kIntra;
  double timeout_s = 300;
};

/// Time and traffic of one communicator since birth. Units: nanoseconds, bytes.
struct CommStats {
  std::int64_t wait_ns =
      0;  ///< the calling thread stood in wait()/wait_released()/wait_all() with nothing to do
  std::int64_t reduce_ns = 0;  ///< the calling thread did arithmetic or copies of a collective
  std::int64_t staged_bytes =
      0;  ///< copied into or out of staging because a tensor was not in shared memory
};

/// Asynchronous collectives over one group.
///
/// Collective: all ranks of the group call the same methods in the same order with matching sizes
/// and dtypes. Back ends that can (local, shm) compare a signature of each call between ranks and
/// throw on both when they differ. Tensors: contiguous, on one device, of any floating dtype (fp64,
/// fp32, bf16, fp16) or an integer, uint8 or bool dtype where no arithmetic is done; zero-size
/// tensors are ordinary. Sums of bf16 and fp16 are accumulated in fp32, in rank order, so the same
/// inputs give the same bits on every run. Memory: the tensors are held until the Work is done; the
/// caller may not write inputs nor read outputs before wait() (and see Work::wait_released).
/// Threads: one calling thread. Errors: InvalidArgument at the call for a bad shape or dtype;
/// CommError from wait().
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const GroupInfo& info() const { return info_; }
  int rank() const { return info_.rank; }
  int size() const { return static_cast<int>(info_.global_ranks.size()); }
  CollectiveLog& log() { return log_; }
  virtual std::string backend() const = 0;  ///< `local`, `shm`, `c10d:gloo`, `fake` …

  /// Gathers each rank's `input` into `output` in rank order.
  ///
  /// Shapes: 1-D views by numel; `counts[r]` elements come from rank r ({} = even: output.numel() /
  /// size each); input.numel() == counts[rank]. In place: `input` may be the very slice of `output`
  /// where it ends up; then this rank copies nothing. Collective: yes. Errors: InvalidArgument if
  /// counts, sizes or dtypes do not fit; CommError from Work::wait().
  WorkPtr all_gather(
      const at::Tensor& output,
      const at::Tensor& input,
      std::span<const std::int64_t> counts = {},
      std::string_view unit = {}
  );

  /// Reduces `input` over all ranks and leaves on rank r its slice of counts[r] elements in
  /// `output`.
  ///
  /// Shapes: input.numel() == sum(counts); output.numel() == counts[rank]. In place: `output` may
  /// be that slice of `input`, or lie elsewhere. Output may have a wider floating dtype than input
  /// (bf16 in, fp32 out). Collective: yes. Errors: as for all_gather.
  WorkPtr reduce_scatter(
      const at::Tensor& output,
      const at::Tensor& input,
      std::span<const std::int64_t> counts = {},
      Reduction reduction = {},
      std::string_view unit = {}
  );

  /// Reduces `tensor` over all ranks in place; all ranks get the same bits.
  /// Collective: yes.
  /// Errors: as for all_gather.
  WorkPtr all_reduce(
      const at::Tensor& tensor, Reduction reduction = {}, std::string_view unit = {}
  );

  /// Copies `tensor` of rank `root` to all ranks.
  /// Collective: yes.
  /// Errors: as for all_gather; InvalidArgument if root is out of range.
  WorkPtr broadcast(const at::Tensor& tensor, int root, std::string_view unit = {});

  /// Sends the r-th run of `input` to rank r and receives rank r's run as the r-th of `output`.
  /// Shapes: runs are given by element counts; {} = even.
  /// Collective: yes; input_counts[r] here equals output_counts[this rank] there.
  /// Errors: as for all_gather.
  WorkPtr all_to_all(
      const at::Tensor& output,
      const at::Tensor& input,
      std::span<const std::int64_t> output_counts = {},
      std::span<const std::int64_t> input_counts = {},
      std::string_view unit = {}
  );

  /// Completes when every rank has called it.
  /// Collective: yes.
  /// Errors: CommError from Work::wait().
  WorkPtr barrier(std::string_view unit = {});

  /// Tells whether the ranks can map each other's memory (allocate_*, make_epoch_board).
  virtual bool has_shared_memory() const { return false; }
  /// Allocates one buffer mapped by all ranks. Collective: yes, equal `bytes`. Errors: Unsupported
  /// without shared memory; CommError if a rank cannot allocate.
  virtual std::shared_ptr<SharedBuffer> allocate_shared(std::int64_t bytes, std::string_view what);
  /// Allocates a region a rank, readable by all. Collective: yes, equal `bytes`. Errors: as for
  /// allocate_shared.
  virtual std::shared_ptr<SymmetricArena> allocate_symmetric(
      std::int64_t bytes, std::string_view what
  );
  /// Makes counters shared by all ranks. Collective: yes, equal `num_rows`. Errors: as for
  /// allocate_shared.
  virtual std::shared_ptr<EpochBoard> make_epoch_board(int num_rows, std::string_view what);

  virtual CommStats stats() const { return {}; }

 protected:
  explicit Communicator(GroupInfo info);

  /// A validated call: flat contiguous tensors and full counts.
  struct Call {
    Op op = Op::kBarrier;
    at::Tensor output;
    at::Tensor input;
    std::vector<std::int64_t> output_counts;  ///< all-gather, all-to-all: by source rank
    std::vector<std::int64_t> input_counts;   ///< reduce-scatter, all-to-all: by destination rank
    Reduction reduce;
    int root = 0;
    std::string unit;
    std::uint64_t sequence = 0;  ///< of this communicator
  };
  /// Starts a validated call; the back end's one duty.
  virtual WorkPtr start(Call call) = 0;

 private:
  WorkPtr submit(Call call);

  GroupInfo info_;
  CollectiveLog log_;
  std::uint64_t next_sequence_ = 0;
};

}  // namespace hypershard::comm
