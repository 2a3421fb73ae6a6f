// Why: every back end sees only calls that fit: shapes, counts, dtypes and overlaps are checked
// here once, and every call is logged before it starts.
#include "hypershard/comm/communicator.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <utility>

#include "hypershard/comm/internal/dtype_text.h"
#include "hypershard/core/error.h"

namespace hypershard::comm {
namespace {

using Counts = std::vector<std::int64_t>;

/// Names the call in messages: `comm: all_gather of unit 'blocks.3' on 'shard'`.
struct Subject {
  Op op;
  std::string_view unit;
  const GroupInfo& info;
};
std::string to_text(const Subject& subject) {
  std::string text = "comm: " + to_text(subject.op);
  text += subject.unit.empty() ? "" : concat_text(" of unit '", subject.unit, "'");
  return text + " on '" + subject.info.name + "'";
}

void check_tensor(const Subject& subject, std::string_view name, const at::Tensor& tensor) {
  HS_CHECK(tensor.defined(), subject, ": `", name, "` is an undefined tensor");
  HS_CHECK(
      tensor.layout() == at::kStrided && tensor.is_contiguous(),
      subject,
      ": `",
      name,
      "` is not contiguous: sizes ",
      tensor.sizes(),
      tensor.layout() == at::kStrided ? concat_text(", strides ", tensor.strides())
                                      : ", not strided",
      HS_HINT("pass the flat buffer, or a contiguous copy")
  );
}

/// Returns `tensor` as one row, outside autograd.
at::Tensor flat(const at::Tensor& tensor) {
  if (tensor.dim() == 1 && !tensor.requires_grad()) {
    return tensor;
  }
  return tensor.detach().view({tensor.numel()});
}

void check_same(const Subject& subject, const at::Tensor& output, const at::Tensor& input) {
  HS_CHECK(
      output.device() == input.device(),
      subject,
      ": tensors on two devices: output on ",
      output.device().str(),
      ", input on ",
      input.device().str()
  );
  HS_CHECK(
      output.scalar_type() == input.scalar_type(),
      subject,
      ": dtypes differ: output ",
      internal::dtype_text(output.scalar_type()),
      ", input ",
      internal::dtype_text(input.scalar_type())
  );
}

bool is_arithmetic(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 ||
         dtype == at::kHalf;
}

void check_reducible(const Subject& subject, at::ScalarType dtype) {
  HS_CHECK(
      is_arithmetic(dtype),
      subject,
      ": cannot reduce ",
      internal::dtype_text(dtype),
      " (expected float64, float32, bfloat16 or float16)",
      HS_HINT("convert to a floating dtype, or gather and reduce locally")
  );
}

void check_divisor(const Subject& subject, double divisor) {
  HS_CHECK(
      std::isfinite(divisor) && divisor != 0,
      subject,
      ": a result cannot be divided by ",
      divisor,
      " (expected a finite number other than 0)"
  );
}

/// Checks that a reduction of `input` values may be left in `output`: same dtype or a wider one.
void check_reduce_dtypes(const Subject& subject, at::ScalarType output, at::ScalarType input) {
  check_reducible(subject, input);
  const bool half = input == at::kBFloat16 || input == at::kHalf;
  const bool fits = output == input || output == at::kDouble || (output == at::kFloat && half);
  HS_CHECK(
      fits && is_arithmetic(output),
      subject,
      ": the output's dtype is narrower than the input's: output ",
      internal::dtype_text(output),
      ", input ",
      internal::dtype_text(input),
      " (expected the same or a wider floating dtype)"
  );
}

/// Returns full counts whose sum is `numel`; {} means even.
Counts full_counts(
    const Subject& subject,
    std::string_view name,
    std::span<const std::int64_t> counts,
    std::int64_t numel,
    std::string_view whole
) {
  const auto size = static_cast<std::int64_t>(subject.info.global_ranks.size());
  if (counts.empty()) {
    HS_CHECK(
        numel % size == 0,
        subject,
        ": `",
        whole,
        "` of ",
        numel,
        " elements cannot be cut evenly over ",
        size,
        " ranks",
        HS_HINT("pass `", name, "`")
    );
    return Counts(static_cast<std::size_t>(size), numel / size);
  }
  HS_CHECK_EQ(
      static_cast<std::int64_t>(counts.size()),
      size,
      subject,
      ": `",
      name,
      "` needs one entry a rank, got ",
      counts
  );
  HS_CHECK(
      std::all_of(counts.begin(), counts.end(), [](std::int64_t count) { return count >= 0; }),
      subject,
      ": `",
      name,
      "` has a negative entry: ",
      counts
  );
  const std::int64_t total = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  HS_CHECK_EQ(total, numel, subject, ": `", name, "` ", counts, " do not add up to `", whole, "`");
  return {counts.begin(), counts.end()};
}

std::int64_t offset_of(const Counts& counts, int rank) {
  return std::accumulate(counts.begin(), counts.begin() + rank, std::int64_t{0});
}

std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
}

const std::byte* address_of(const at::Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.const_data_ptr());
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0 || a.is_meta() || b.is_meta()) {
    return false;
  }
  return address_of(a) < address_of(b) + bytes_of(b) && address_of(b) < address_of(a) + bytes_of(a);
}

/// Checks that `part` lies apart from `whole`, or is the very slice of it that starts at `offset`.
void check_overlap(
    const Subject& subject,
    std::string_view part_name,
    const at::Tensor& part,
    std::string_view whole_name,
    const at::Tensor& whole,
    std::int64_t offset
) {
  if (!overlap(part, whole)) {
    return;
  }
  const auto slice = offset * static_cast<std::int64_t>(whole.element_size());
  const bool same = part.scalar_type() == whole.scalar_type();
  HS_CHECK(
      same && address_of(part) == address_of(whole) + slice,
      subject,
      ": `",
      part_name,
      "` overlaps `",
      whole_name,
      "` at byte ",
      address_of(part) - address_of(whole),
      " (in place it must be this rank's slice, at byte ",
      slice,
      ", of the same dtype)"
  );
}

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
  check_overlap(
      subject, "input", call.input, "output", call.output, offset_of(call.output_counts, rank())
  );
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
  check_tensor(subject, "output", output);
  check_tensor(subject, "input", input);
  check_reduce_dtypes(subject, output.scalar_type(), input.scalar_type());
  check_divisor(subject, reduction.divisor);
  HS_CHECK(
      output.device() == input.device(),
      subject,
      ": tensors on two devices: output on ",
      output.device().str(),
      ", input on ",
      input.device().str()
  );
  Call call;
  call.op = Op::kReduceScatter;
  call.reduce = reduction;
  call.input_counts = full_counts(subject, "counts", counts, input.numel(), "input");
  HS_CHECK_EQ(
      output.numel(),
      call.input_counts[static_cast<std::size_t>(rank())],
      subject,
      ": `output` does not have this rank's count of elements (counts ",
      call.input_counts,
      ")"
  );
  call.output = flat(output);
  call.input = flat(input);
  check_overlap(
      subject, "output", call.output, "input", call.input, offset_of(call.input_counts, rank())
  );
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
      !overlap(output, input),
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
  if (call.op != Op::kBarrier) {
    const at::Tensor& whole = call.op == Op::kAllGather ? call.output : call.input;
    entry.dtype = internal::dtype_text(whole.scalar_type());
    entry.payload_bytes = bytes_of(whole);
  }
  log_.append(std::move(entry));
  return start(std::move(call));
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
