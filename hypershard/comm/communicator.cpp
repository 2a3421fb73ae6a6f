// Why: every back end sees only calls that fit: shapes, counts, dtypes and overlaps are checked
// here once, and every call is logged before it starts.
#include "hypershard/comm/communicator.h"

#include <cstddef>
#include <utility>

#include "hypershard/comm/internal/call_checks.h"
#include "hypershard/comm/internal/dtype_text.h"
#include "hypershard/comm/traffic.h"
#include "hypershard/core/error.h"

namespace hypershard::comm {
namespace {

using internal::check_divisor;
using internal::check_overlap;
using internal::check_reducible;
using internal::check_same;
using internal::check_segments_apart;
using internal::check_tensor;
using internal::check_wire;
using internal::checked_segment;
using internal::flat;
using internal::full_counts;
using internal::Subject;

std::int64_t element_bytes(at::ScalarType dtype) {
  return static_cast<std::int64_t>(at::elementSize(dtype));
}

/// Starts nothing itself: is done when all its parts are.
class JoinedWork : public Work {
 public:
  explicit JoinedWork(std::vector<WorkPtr> parts) : parts_(std::move(parts)) {}

  bool test() override {
    // All of them: parts may advance only inside their own test().
    bool done = true;
    for (const WorkPtr& part : parts_) {
      done = part->test() && done;
    }
    return done;
  }
  void wait() override {
    for (const WorkPtr& part : parts_) {
      part->wait();
    }
  }
  void wait_released() override {
    for (const WorkPtr& part : parts_) {
      part->wait_released();
    }
  }

 private:
  std::vector<WorkPtr> parts_;
};

}  // namespace

std::string to_text(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kMin:
      return "min";
  }
  return "unknown";
}

Communicator::Communicator(GroupInfo info) : info_(std::move(info)) {
  HS_CHECK(
      info_.rank >= 0 && info_.rank < size(),
      "comm: communicator '",
      info_.name,
      "': rank ",
      info_.rank,
      " is out of range (expected 0 to ",
      size() - 1,
      ")"
  );
}

WorkPtr Communicator::all_gather(
    const at::Tensor& output,
    const at::Tensor& input,
    std::span<const std::int64_t> counts,
    std::string_view unit
) {
  const Subject subject{Op::kAllGather, unit, info_};
  check_tensor(subject, "output", output);
  check_tensor(subject, "input", input);
  check_same(subject, output, input);
  Call call;
  call.op = Op::kAllGather;
  call.output_counts = full_counts(subject, "counts", counts, output.numel(), "output");
  HS_CHECK_EQ(
      input.numel(),
      call.output_counts[static_cast<std::size_t>(rank())],
      subject,
      ": `input` does not have this rank's count of elements (counts ",
      call.output_counts,
      ")"
  );
  call.output = flat(output);
  call.input = flat(input);
  check_overlap(subject, "input", call.input, "output", call.output, call.output_counts);
  call.unit = unit;
  return submit(std::move(call));
}

WorkPtr Communicator::reduce_scatter(
    const at::Tensor& output,
    const at::Tensor& input,
    std::span<const std::int64_t> counts,
    Reduction reduction,
    std::string_view unit
) {
  const Subject subject{Op::kReduceScatter, unit, info_};
  Call call;
  call.op = Op::kReduceScatter;
  call.segments.push_back(checked_segment(subject, output, input, counts));
  call.reduce = reduction;
  check_divisor(subject, reduction.divisor);
  check_wire(subject, input.scalar_type(), call.reduce);
  set_only_segment(call);
  call.unit = unit;
  return submit(std::move(call));
}

WorkPtr Communicator::reduce_scatter(
    std::span<const ReduceSegment> segments, Reduction reduction, std::string_view unit
) {
  Subject subject{Op::kReduceScatter, unit, info_};
  HS_CHECK(
      !segments.empty(),
      subject,
      ": no segments",
      HS_HINT("all ranks must skip a reduction of nothing")
  );
  check_divisor(subject, reduction.divisor);
  Call call;
  call.op = Op::kReduceScatter;
  call.reduce = reduction;
  call.segments.reserve(segments.size());
  for (const ReduceSegment& segment : segments) {
    subject.segment = static_cast<int>(call.segments.size());
    call.segments.push_back(checked_segment(subject, segment.output, segment.input, segment.counts)
    );
    internal::check_same_dtypes(subject, call.segments.front(), call.segments.back());
  }
  subject.segment = -1;
  check_wire(subject, segments.front().input.scalar_type(), call.reduce);
  check_segments_apart(subject, call.segments);
  set_only_segment(call);
  call.unit = unit;
  return submit(std::move(call));
}

WorkPtr Communicator::all_reduce(
    const at::Tensor& tensor, Reduction reduction, std::string_view unit
) {
  const Subject subject{Op::kAllReduce, unit, info_};
  check_tensor(subject, "tensor", tensor);
  check_reducible(subject, tensor.scalar_type());
  check_divisor(subject, reduction.divisor);
  Call call;
  call.op = Op::kAllReduce;
  call.reduce = reduction;
  check_wire(subject, tensor.scalar_type(), call.reduce);
  call.output = flat(tensor);
  call.input = call.output;
  call.unit = unit;
  return submit(std::move(call));
}

WorkPtr Communicator::broadcast(const at::Tensor& tensor, int root, std::string_view unit) {
  const Subject subject{Op::kBroadcast, unit, info_};
  check_tensor(subject, "tensor", tensor);
  HS_CHECK(
      root >= 0 && root < size(),
      subject,
      ": root ",
      root,
      " is out of range (expected 0 to ",
      size() - 1,
      ")"
  );
  Call call;
  call.op = Op::kBroadcast;
  call.root = root;
  call.output = flat(tensor);
  call.input = call.output;
  call.unit = unit;
  return submit(std::move(call));
}

WorkPtr Communicator::all_to_all(
    const at::Tensor& output,
    const at::Tensor& input,
    std::span<const std::int64_t> output_counts,
    std::span<const std::int64_t> input_counts,
    std::string_view unit
) {
  const Subject subject{Op::kAllToAll, unit, info_};
  check_tensor(subject, "output", output);
  check_tensor(subject, "input", input);
  check_same(subject, output, input);
  HS_CHECK(
      !internal::overlap(output, input),
      subject,
      ": `output` overlaps `input`",
      HS_HINT("an all-to-all has no in-place form: pass two buffers")
  );
  Call call;
  call.op = Op::kAllToAll;
  call.output_counts =
      full_counts(subject, "output_counts", output_counts, output.numel(), "output");
  call.input_counts = full_counts(subject, "input_counts", input_counts, input.numel(), "input");
  const auto self = static_cast<std::size_t>(rank());
  HS_CHECK_EQ(
      call.output_counts[self],
      call.input_counts[self],
      subject,
      ": the run that this rank sends to itself is not the one it receives: output_counts ",
      call.output_counts,
      ", input_counts ",
      call.input_counts
  );
  call.output = flat(output);
  call.input = flat(input);
  call.unit = unit;
  return submit(std::move(call));
}

WorkPtr Communicator::barrier(std::string_view unit) {
  Call call;
  call.op = Op::kBarrier;
  call.unit = unit;
  return submit(std::move(call));
}

WorkPtr Communicator::submit(Call call) {
  call.sequence = next_sequence_++;
  LogEntry entry;
  entry.sequence = call.sequence;
  entry.op = call.op;
  entry.communicator = info_.name;
  entry.unit = call.unit;
  if (call.op == Op::kReduceScatter) {
    const at::ScalarType dtype =
        call.reduce.wire.value_or(call.segments.front().input.scalar_type());
    entry.dtype = internal::dtype_text(dtype);
    for (const ReduceSegment& segment : call.segments) {
      entry.payload_bytes += segment.input.numel() * element_bytes(dtype);
    }
  } else if (call.op != Op::kBarrier) {
    const at::Tensor& whole = call.op == Op::kAllGather ? call.output : call.input;
    const at::ScalarType dtype = call.reduce.wire.value_or(whole.scalar_type());
    entry.dtype = internal::dtype_text(dtype);
    entry.payload_bytes = whole.numel() * element_bytes(dtype);
  }
  log_.append(std::move(entry));
  count_traffic(call);
  return start(std::move(call));
}

void Communicator::count_traffic(const Call& call) {
  Traffic traffic;
  std::int64_t element = 1;
  if (call.input.defined()) {
    element = element_bytes(call.reduce.wire.value_or(call.input.scalar_type()));
  }
  switch (call.op) {
    case Op::kAllGather:
      traffic = gather_traffic(call.output_counts, rank());
      break;
    case Op::kReduceScatter:
      element = element_bytes(call.reduce.wire.value_or(call.segments.front().input.scalar_type()));
      for (const ReduceSegment& segment : call.segments) {
        const auto part = scatter_traffic(segment.counts, rank());
        traffic.sent += part.sent;
        traffic.received += part.received;
      }
      break;
    case Op::kAllToAll:
      traffic.sent = scatter_traffic(call.input_counts, rank()).sent;
      traffic.received = gather_traffic(call.output_counts, rank()).received;
      break;
    case Op::kAllReduce:
      traffic = all_reduce_traffic(call.input.numel(), element, rank(), size());
      element = 1;
      break;
    case Op::kBroadcast:
      traffic = broadcast_traffic(call.input.numel() * element, call.root, rank(), size());
      element = 1;
      break;
    case Op::kBarrier:
      break;
  }
  sent_bytes_ += traffic.sent * element;
  received_bytes_ += traffic.received * element;
}

void Communicator::set_only_segment(Call& call) {
  if (call.segments.size() == 1) {
    call.output = call.segments.front().output;
    call.input = call.segments.front().input;
    call.input_counts = call.segments.front().counts;
  }
}

WorkPtr Communicator::start_each(const Call& call) {
  std::vector<WorkPtr> parts;
  for (std::size_t i = 0; i < call.segments.size(); ++i) {
    Call part;
    part.op = call.op;
    part.reduce = call.reduce;
    part.segments = {call.segments[i]};
    set_only_segment(part);
    part.unit = concat_text(call.unit, " (", i + 1, " of ", call.segments.size(), ")");
    part.sequence = call.sequence;
    parts.push_back(start(std::move(part)));
  }
  return std::make_shared<JoinedWork>(std::move(parts));
}

CommStats Communicator::stats() const {
  CommStats stats = measured();
  stats.sent_bytes = sent_bytes_;
  stats.received_bytes = received_bytes_;
  return stats;
}

std::shared_ptr<SharedBuffer> Communicator::allocate_shared(std::int64_t, std::string_view what) {
  HS_FAIL(
      Unsupported,
      "comm: the ranks of '",
      info_.name,
      "' share no memory over ",
      backend(),
      ": cannot allocate a shared buffer for ",
      what,
      HS_HINT("ask has_shared_memory() first")
  );
}

std::shared_ptr<SharedBuffer> Communicator::allocate_sparse(
    std::int64_t bytes, std::string_view what
) {
  return allocate_shared(bytes, what);
}

std::shared_ptr<SymmetricArena> Communicator::allocate_symmetric(
    std::int64_t, std::string_view what
) {
  HS_FAIL(
      Unsupported,
      "comm: the ranks of '",
      info_.name,
      "' share no memory over ",
      backend(),
      ": cannot allocate a symmetric arena for ",
      what,
      HS_HINT("ask has_shared_memory() first")
  );
}

std::shared_ptr<EpochBoard> Communicator::make_epoch_board(int, std::string_view what) {
  HS_FAIL(
      Unsupported,
      "comm: the ranks of '",
      info_.name,
      "' share no memory over ",
      backend(),
      ": cannot make an epoch board for ",
      what,
      HS_HINT("ask has_shared_memory() first")
  );
}

}  // namespace hypershard::comm
