// Collectives on plain tensors over one group of ranks: the one interface that all back ends
// implement. The engine, the optimizers and the plans talk to ranks through this class only.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
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

/// A join, what its result is divided by, and how its values travel.
///
/// The division comes once, after all values are joined, in the dtype of the accumulation and
/// before the result is rounded to the output's dtype; it costs no pass over memory of its own.
///
/// NOTE [wire dtype]
/// With a wire dtype every value is rounded to it once, before it is joined: those that travel and
/// this rank's own as well, so that a result has the same bits whichever rank owns it, whatever the
/// cut and on every back end, also where nothing travels. Joins are as ever: in fp32, in rank
/// order, divided, left in the output's dtype. The result of an all-reduce travels too and is
/// rounded as well, on all ranks. What the log calls dtype and bytes are the wire's. An all-gather
/// needs none: it moves what it is given.
struct Reduction {
  ReduceOp op = ReduceOp::kSum;
  double divisor = 1;  ///< equal on all ranks; 1 divides nothing
  /// bf16 for fp32 tensors, or the tensors' own; none is the tensors' own.
  std::optional<at::ScalarType> wire;
  // NOLINTNEXTLINE(google-explicit-constructor): most reductions are no more than their operation
  Reduction(
      ReduceOp join = ReduceOp::kSum,
      double divide_by = 1,
      std::optional<at::ScalarType> travel_as = std::nullopt
  )
      : op(join), divisor(divide_by), wire(travel_as) {}
};

/// One tensor of a reduction of several, cut among the ranks by counts of its own.
struct ReduceSegment {
  at::Tensor output;
  at::Tensor input;
  std::vector<std::int64_t> counts = {};  ///< elements by rank; {} = even
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
  std::int64_t asleep_ns = 0;  ///< of that, it did not even spin; shared memory only
  std::int64_t late_ns = 0;    ///< of that, the result had not arrived; the rest went by until the
                               ///< thread ran again; messages only
  std::int64_t reduce_ns = 0;  ///< the calling thread did arithmetic or copies of a collective
  std::int64_t staged_bytes =
      0;  ///< copied into or out of staging because a tensor was not in shared memory
  std::int64_t busy_ns = 0;  ///< at least one collective was in flight
  /// Payload of all collectives started that this rank sends to, and gets from, the others: exact
  /// over messages, and what messages would carry where memory is shared. A reduce-scatter of n
  /// bytes over S ranks sends n less this rank's slice and gets S - 1 times that slice; a gather
  /// the other way round. Tokens of barriers are not counted.
  std::int64_t sent_bytes = 0;
  std::int64_t received_bytes = 0;
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

  /// Reduces several tensors at once, as that many reduce-scatters with one entry in the log, one
  /// signature and one wait.
  ///
  /// Inputs are read where they lie and may be few or many, large or empty: what is small travels
  /// together. `unit` names the bucket. The bits are those of reduce-scatters one by one.
  /// Shapes: each segment as reduce_scatter; all inputs have one dtype, as all outputs have.
  /// Memory: no segment may overlap another; `output` in place as for reduce_scatter.
  /// Collective: yes; the same number of segments, with the same counts, in the same order.
  /// Errors: as for all_gather, naming the segment; InvalidArgument without segments.
  WorkPtr reduce_scatter(
      std::span<const ReduceSegment> segments, Reduction reduction = {}, std::string_view unit = {}
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
  /// The same for room of which little may ever be used: pages come on first touch where the back
  /// end can, and a full memory then ends whoever touches it. Collective and errors as
  /// allocate_shared.
  virtual std::shared_ptr<SharedBuffer> allocate_sparse(std::int64_t bytes, std::string_view what);
  /// Allocates a region a rank, readable by all. Collective: yes, equal `bytes`. Errors: as for
  /// allocate_shared.
  virtual std::shared_ptr<SymmetricArena> allocate_symmetric(
      std::int64_t bytes, std::string_view what
  );
  /// Makes counters shared by all ranks. Collective: yes, equal `num_rows`. Errors: as for
  /// allocate_shared.
  virtual std::shared_ptr<EpochBoard> make_epoch_board(int num_rows, std::string_view what);

  CommStats stats() const;

 protected:
  explicit Communicator(GroupInfo info);

  /// A validated call: flat contiguous tensors and full counts.
  struct Call {
    Op op = Op::kBarrier;
    at::Tensor output;
    at::Tensor input;
    std::vector<std::int64_t> output_counts;  ///< all-gather, all-to-all: by source rank
    std::vector<std::int64_t> input_counts;   ///< reduce-scatter, all-to-all: by destination rank
    /// All parts of a reduce-scatter. Of a single one also output, input and input_counts are set,
    /// of several none of them.
    std::vector<ReduceSegment> segments;
    Reduction reduce;  ///< the wire dtype only if it is not the tensors'
    int root = 0;
    std::string unit;
    std::uint64_t sequence = 0;  ///< of this communicator
  };
  /// Starts a validated call; the back end's one duty.
  virtual WorkPtr start(Call call) = 0;
  /// Starts a reduce-scatter of several segments as calls of their own, for back ends that need no
  /// fused one: `start` must take any number of calls in flight.
  WorkPtr start_each(const Call& call);
  /// Returns the times and copies that the back end has measured.
  virtual CommStats measured() const { return {}; }

 private:
  static void set_only_segment(Call& call);
  WorkPtr submit(Call call);
  void count_traffic(const Call& call);

  GroupInfo info_;
  CollectiveLog log_;
  std::uint64_t next_sequence_ = 0;
  std::int64_t sent_bytes_ = 0;
  std::int64_t received_bytes_ = 0;
};

}  // namespace hypershard::comm
