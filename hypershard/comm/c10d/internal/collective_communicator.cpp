// Each collective is a list of stages; a stage does local work on the calling thread and starts at
// most one round of the back end. See NOTE [collectives of a wrapped back end].
#include "hypershard/comm/c10d/internal/collective_communicator.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <numeric>
#include <thread>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "hypershard/comm/c10d/internal/backend_text.h"
#include "hypershard/comm/internal/idle_work.h"
#include "hypershard/comm/internal/ordered_reduce.h"
#include "hypershard/core/clock.h"
#include "hypershard/core/error.h"

namespace hypershard::comm::internal {
namespace {

using BackendWork = c10::intrusive_ptr<::c10d::Work>;

// Up to this many bytes an all-reduce gathers all inputs.
constexpr std::int64_t kOneRoundBytes = 64 * 1024;

std::size_t idx(int index) {
  return static_cast<std::size_t>(index);
}

// Data is moved as bytes: no back end knows every dtype, all know this one.
at::Tensor as_bytes(const at::Tensor& tensor) {
  return tensor.view(at::kByte);
}

std::vector<std::int64_t> scaled(std::vector<std::int64_t> counts, const at::Tensor& tensor) {
  for (std::int64_t& count : counts) {
    count *= static_cast<std::int64_t>(tensor.element_size());
  }
  return counts;
}

std::int64_t offset_of(const std::vector<std::int64_t>& counts, int rank) {
  return std::accumulate(counts.begin(), counts.begin() + rank, std::int64_t{0});
}

}  // namespace

// One collective: what is in flight now and the stages still to come.
class StagedCollective : public Work {
 public:
  using Stage = std::function<std::vector<BackendWork>()>;

  StagedCollective(
      std::shared_ptr<CommStats> stats,
      std::shared_ptr<BusyClock> busy,
      std::string what,
      double timeout_s
  )
      : stats_(std::move(stats)),
        busy_(std::move(busy)),
        what_(std::move(what)),
        timeout_s_(timeout_s) {
    busy_->begin();
  }

  void hold(at::Tensor tensor) { tensors_.push_back(std::move(tensor)); }
  void hold(StagingPool::Lease lease) { leases_.push_back(std::move(lease)); }
  void add_stage(Stage stage) { stages_.push_back(std::move(stage)); }
  /// A last stage that starts nothing, after those added before.
  void add_end(std::function<void()> end) { ends_.push_back(std::move(end)); }

  bool has_stages() const { return !stages_.empty(); }
  bool is_done() const { return is_done_ || error_ != nullptr; }
  /// Starts the first stage; a failure waits for wait(), as one that comes later does.
  void start_first() {
    try {
      in_flight_ = next_stage();
    } catch (const std::exception& error) {
      keep(error);
    }
  }
  bool test() override { return advance(/*may_block=*/false, /*to_end=*/true); }
  void wait() override { advance(/*may_block=*/true, /*to_end=*/true); }
  /// Starts all stages; what the last one started may still be in flight.
  void start_stages() { advance(/*may_block=*/true, /*to_end=*/false); }

 private:
  bool advance(bool may_block, bool to_end) {
    if (error_ != nullptr) {
      std::rethrow_exception(error_);
    }
    try {
      while (!is_done_ && (to_end || !stages_.empty())) {
        if (!join(may_block)) {
          return false;
        }
        if (!stages_.empty()) {
          in_flight_ = next_stage();
          continue;
        }
        if (!ends_.empty()) {
          const Stopwatch watch;
          for (const auto& end : ends_) {
            end();
          }
          stats_->reduce_ns += watch.elapsed_ns();
        }
        is_done_ = true;
        busy_->end();
        tensors_.clear();
        leases_.clear();
      }
    } catch (const std::exception& error) {
      keep(error);
      std::rethrow_exception(error_);
    }
    return is_done_;
  }

  std::vector<BackendWork> next_stage() {
    if (stages_.empty()) {
      return {};
    }
    const Stage stage = std::move(stages_.front());
    stages_.pop_front();
    return stage();
  }

  // Our own errors pass as they are; the back end's become CommErrors.
  void keep(const std::exception& error) {
    busy_->end();
    if (dynamic_cast<const Error*>(&error) != nullptr) {
      error_ = std::current_exception();
      return;
    }
    error_ = std::make_exception_ptr(
        CommError("comm.c10d: " + what_ + " failed; the back end said: " + backend_text(error))
    );
  }

  bool join(bool may_block) {
    const bool is_cpu = tensors_.empty() || tensors_.front().device().is_cpu();
    for (const BackendWork& work : in_flight_) {
      if (!may_block && !work->isCompleted()) {
        return false;
      }
      const Stopwatch watch;
      const std::int64_t elsewhere_ns = is_cpu ? work_elsewhere(*work) : 0;
      // On a device a wait without timeout makes the current stream wait, with one this thread.
      const auto timeout = std::chrono::milliseconds(static_cast<std::int64_t>(timeout_s_ * 1e3));
      HS_ASSERT(work->wait(is_cpu ? timeout : kNoTimeout), "comm.c10d: ", what_, " was aborted");
      stats_->wait_ns += watch.elapsed_ns() - elsewhere_ns;
    }
    in_flight_.clear();
    return true;
  }

  // As long as other calls of this thread are open; returns the time that these took.
  std::int64_t work_elsewhere(::c10d::Work& work) const {
    const Stopwatch watch;
    std::int64_t elsewhere_ns = 0;
    while (!work.isCompleted() && watch.elapsed_s() < timeout_s_) {
      const IdleWorker::State state = IdleWork::work(nullptr, elsewhere_ns);
      if (state == IdleWorker::State::kNothing) {
        break;
      }
      if (state == IdleWorker::State::kStuck) {
        std::this_thread::sleep_for(std::chrono::nanoseconds(kIdleSliceNs));
      }
    }
    return elsewhere_ns;
  }

  std::shared_ptr<CommStats> stats_;
  std::shared_ptr<BusyClock> busy_;
  std::string what_;
  double timeout_s_;
  std::vector<at::Tensor> tensors_;
  std::vector<StagingPool::Lease> leases_;
  std::deque<Stage> stages_;
  std::vector<std::function<void()>> ends_;
  std::vector<BackendWork> in_flight_;
  bool is_done_ = false;
  std::exception_ptr error_;
};

void reduce_rows(
    const at::Tensor& output,
    const at::Tensor& inputs,
    Reduction reduction,
    std::int64_t first,
    std::int64_t row_numel
) {
  const std::int64_t numel = output.numel();
  if (numel == 0) {
    return;
  }
  const std::int64_t stride = row_numel == 0 ? numel : row_numel;
  const std::int64_t num_rows = inputs.numel() / stride;
  if (output.device().is_cpu()) {
    std::vector<const std::byte*> rows;
    for (std::int64_t row = 0; row < num_rows; ++row) {
      rows.push_back(
          static_cast<const std::byte*>(inputs.const_data_ptr()) +
          (row * stride + first) * static_cast<std::int64_t>(inputs.element_size())
      );
    }
    ordered_reduce(
        static_cast<std::byte*>(output.data_ptr()),
        output.scalar_type(),
        rows,
        inputs.scalar_type(),
        numel,
        reduction
    );
    return;
  }
  const bool is_wide = inputs.scalar_type() == at::kDouble || output.scalar_type() == at::kDouble;
  const at::ScalarType wide = is_wide ? at::kDouble : at::kFloat;
  at::Tensor sum = inputs.narrow(0, first, numel).to(wide, /*non_blocking=*/false, /*copy=*/true);
  for (std::int64_t row = 1; row < num_rows; ++row) {
    const at::Tensor next = inputs.narrow(0, row * stride + first, numel).to(wide);
    switch (reduction.op) {
      case ReduceOp::kSum:
        sum.add_(next);
        break;
      case ReduceOp::kMax:
        sum = at::maximum(sum, next);
        break;
      case ReduceOp::kMin:
        sum = at::minimum(sum, next);
        break;
    }
  }
  if (reduction.divisor != 1) {
    sum.div_(reduction.divisor);
  }
  output.copy_(sum);
}

CollectiveCommunicator::CollectiveCommunicator(
    GroupInfo info, c10::intrusive_ptr<::c10d::Backend> backend, std::string backend_name
)
    : Communicator(std::move(info)),
      backend_(std::move(backend)),
      backend_name_(std::move(backend_name)) {}

CollectiveCommunicator::~CollectiveCommunicator() = default;

at::Tensor CollectiveCommunicator::stage(
    StagedCollective& work, std::int64_t numel, at::ScalarType dtype, at::Device device
) {
  const auto bytes = numel * static_cast<std::int64_t>(at::elementSize(dtype));
  if (bytes == 0) {
    return at::empty({0}, at::TensorOptions().dtype(dtype).device(device));
  }
  StagingPool::Lease lease = staging_->lend(bytes, device);
  at::Tensor tensor = lease.tensor().narrow(0, 0, bytes).view(dtype);
  work.hold(std::move(lease));
  stats_->staged_bytes += bytes;
  return tensor;
}

void CollectiveCommunicator::add_all_gather(StagedCollective& work, const Call& call) {
  if (call.output.numel() == 0) {
    return;
  }
  const std::vector<std::int64_t>& counts = call.output_counts;
  const bool is_even = std::count(counts.begin(), counts.end(), counts.front()) ==
                       static_cast<std::ptrdiff_t>(counts.size());
  if (is_even) {
    work.add_stage(
        [backend = backend_, output = as_bytes(call.output), input = as_bytes(call.input)] {
          at::Tensor to = output;
          at::Tensor from = input;
          return std::vector<BackendWork>{backend->_allgather_base(to, from)};
        }
    );
    return;
  }
  work.add_stage([backend = backend_, call, rank = rank(), stats = stats_] {
    const at::Tensor own =
        call.output.narrow(0, offset_of(call.output_counts, rank), call.input.numel());
    if (own.numel() > 0 && own.const_data_ptr() != call.input.const_data_ptr()) {
      const Stopwatch watch;
      own.copy_(call.input);
      stats->reduce_ns += watch.elapsed_ns();
    }
    std::vector<BackendWork> works;
    for (int root = 0; root < static_cast<int>(call.output_counts.size()); ++root) {
      const std::int64_t count = call.output_counts[idx(root)];
      if (count > 0) {
        std::vector<at::Tensor> slice = {
            as_bytes(call.output.narrow(0, offset_of(call.output_counts, root), count))
        };
        ::c10d::BroadcastOptions options;
        options.rootRank = root;
        works.push_back(backend->broadcast(slice, options));
      }
    }
    return works;
  });
}

void CollectiveCommunicator::add_reduce_scatter(StagedCollective& work, const Call& call) {
  const at::ScalarType dtype = call.segments.front().input.scalar_type();
  const at::ScalarType wire = call.reduce.wire.value_or(dtype);
  const at::Device device = call.segments.front().input.device();
  std::vector<std::int64_t> sent(idx(size()));  // elements by rank, of all segments
  std::int64_t own = 0;
  for (const ReduceSegment& segment : call.segments) {
    for (int peer = 0; peer < size(); ++peer) {
      sent[idx(peer)] += segment.counts[idx(peer)];
    }
    own += segment.counts[idx(rank())];
  }
  const std::int64_t numel = offset_of(sent, size());
  if (numel == 0) {
    return;
  }
  at::Tensor input = call.input;
  if (call.segments.size() > 1 || wire != dtype) {
    input = pack(stage(work, numel, wire, device), call.segments);
  }
  at::Tensor rows = stage(work, own * size(), wire, device);
  work.add_stage([backend = backend_, rows, input, sent, own, size = size()] {
    at::Tensor to = as_bytes(rows);
    at::Tensor from = as_bytes(input);
    std::vector<std::int64_t> to_counts = scaled(std::vector<std::int64_t>(idx(size), own), input);
    std::vector<std::int64_t> from_counts = scaled(sent, input);
    return std::vector<BackendWork>{backend->alltoall_base(to, from, to_counts, from_counts)};
  });
  work.add_end([rows, segments = call.segments, own, reduce = call.reduce] {
    std::int64_t first = 0;
    for (const ReduceSegment& segment : segments) {
      reduce_rows(segment.output, rows, {reduce.op, reduce.divisor}, first, own);
      first += segment.output.numel();
    }
  });
}

// For each rank its slices of all segments.
at::Tensor CollectiveCommunicator::pack(
    at::Tensor packed, const std::vector<ReduceSegment>& segments
) const {
  std::vector<std::int64_t> offsets(segments.size());
  std::int64_t position = 0;
  for (int peer = 0; peer < size(); ++peer) {
    for (std::size_t i = 0; i < segments.size(); ++i) {
      const std::int64_t count = segments[i].counts[idx(peer)];
      packed.narrow(0, position, count).copy_(segments[i].input.narrow(0, offsets[i], count));
      offsets[i] += count;
      position += count;
    }
  }
  return packed;
}

void CollectiveCommunicator::add_all_reduce(StagedCollective& work, const Call& call) {
  const std::int64_t numel = call.input.numel();
  const at::ScalarType dtype = call.input.scalar_type();
  if (numel == 0) {
    return;
  }
  if (call.reduce.wire) {
    Call rounded = call;
    rounded.input = stage(work, numel, *call.reduce.wire, call.input.device());
    rounded.input.copy_(call.input);
    rounded.output = rounded.input;
    rounded.reduce.wire.reset();
    add_all_reduce(work, rounded);
    work.add_end([rounded, call] { call.output.copy_(rounded.output); });
    return;
  }
  if (static_cast<std::int64_t>(call.input.nbytes()) * size() <= kOneRoundBytes) {
    at::Tensor rows = stage(work, numel * size(), dtype, call.input.device());
    work.add_stage([backend = backend_, rows, call] {
      at::Tensor to = as_bytes(rows);
      at::Tensor from = as_bytes(call.input);
      return std::vector<BackendWork>{backend->_allgather_base(to, from)};
    });
    work.add_end([rows, call] { reduce_rows(call.output, rows, call.reduce); });
    return;
  }
  const std::int64_t each = (numel + size() - 1) / size();
  at::Tensor padded = call.output;
  if (each * size() != numel) {
    padded = stage(work, each * size(), dtype, call.input.device());
    padded.narrow(0, 0, numel).copy_(call.input);
    padded.narrow(0, numel, padded.numel() - numel).zero_();
  }
  at::Tensor rows = stage(work, each * size(), dtype, call.input.device());
  work.add_stage([backend = backend_, rows, padded, call, each, size = size()] {
    at::Tensor to = as_bytes(rows);
    at::Tensor from = as_bytes(padded);
    std::vector<std::int64_t> counts = scaled(std::vector<std::int64_t>(idx(size), each), padded);
    return std::vector<BackendWork>{backend->alltoall_base(to, from, counts, counts)};
  });
  work.add_stage([backend = backend_, rows, padded, call, each, rank = rank()] {
    const at::Tensor slice = padded.narrow(0, rank * each, each);
    reduce_rows(slice, rows, call.reduce);
    at::Tensor to = as_bytes(padded);
    at::Tensor from = as_bytes(slice);
    return std::vector<BackendWork>{backend->_allgather_base(to, from)};
  });
  if (padded.const_data_ptr() != call.output.const_data_ptr()) {
    work.add_end([padded, call, numel] { call.output.copy_(padded.narrow(0, 0, numel)); });
  }
}

// Older collectives start what they still have to start, so that all ranks do so at the same place;
// those that nobody holds any more are kept until they are done.
void CollectiveCommunicator::drive_older() {
  for (auto it = in_flight_.begin(); it != in_flight_.end();) {
    if ((*it)->has_stages()) {
      (*it)->start_stages();
    }
    if (it->use_count() == 1 && !(*it)->is_done()) {
      (*it)->test();
    }
    it = (*it)->is_done() ? in_flight_.erase(it) : std::next(it);
  }
}

void CollectiveCommunicator::add_stages(StagedCollective& work, const Call& call) {
  switch (call.op) {
    case Op::kAllGather:
      add_all_gather(work, call);
      break;
    case Op::kReduceScatter:
      add_reduce_scatter(work, call);
      break;
    case Op::kAllReduce:
      add_all_reduce(work, call);
      break;
    case Op::kBroadcast:
      if (call.output.numel() > 0) {
        work.add_stage([backend = backend_, call] {
          std::vector<at::Tensor> tensors = {as_bytes(call.output)};
          ::c10d::BroadcastOptions options;
          options.rootRank = call.root;
          return std::vector<BackendWork>{backend->broadcast(tensors, options)};
        });
      }
      break;
    case Op::kAllToAll:
      // Unlike elsewhere, one rank's tensors may be empty while others' are not.
      work.add_stage([backend = backend_, call] {
        at::Tensor to = as_bytes(call.output);
        at::Tensor from = as_bytes(call.input);
        std::vector<std::int64_t> to_counts = scaled(call.output_counts, call.output);
        std::vector<std::int64_t> from_counts = scaled(call.input_counts, call.input);
        return std::vector<BackendWork>{backend->alltoall_base(to, from, to_counts, from_counts)};
      });
      break;
    case Op::kBarrier:
      work.add_stage([backend = backend_] { return std::vector<BackendWork>{backend->barrier()}; });
      break;
  }
}

CommStats CollectiveCommunicator::measured() const {
  CommStats stats = *stats_;
  stats.busy_ns = busy_->busy_ns();
  return stats;
}

WorkPtr CollectiveCommunicator::start(Call call) {
  drive_older();
  std::string what = concat_text(call.op, " #", call.sequence);
  what += call.unit.empty() ? "" : " of unit '" + call.unit + "'";
  what += " on axis '" + info().name + "'";
  auto work = std::make_shared<StagedCollective>(stats_, busy_, std::move(what), info().timeout_s);
  if (call.op == Op::kReduceScatter) {
    for (const ReduceSegment& segment : call.segments) {
      work->hold(segment.output);
      work->hold(segment.input);
    }
  } else if (call.op != Op::kBarrier) {
    work->hold(call.output);
    work->hold(call.input);
  }
  add_stages(*work, call);
  work->start_first();
  in_flight_.push_back(work);
  return work;
}

}  // namespace hypershard::comm::internal
