// Packing, the collective, unpacking. A copy is made on a side only where the pieces are not runs
// of the tensor on that side.
#include "hypershard/dtensor/internal/box_collective.h"

#include <cstddef>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "hypershard/core/error.h"

namespace hypershard::dtensor::internal {
namespace {

using Reduce = layout::Placement::Reduce;

std::vector<std::int64_t> counts_of(const std::vector<Box>& boxes) {
  std::vector<std::int64_t> counts;
  counts.reserve(boxes.size());
  for (const Box& box : boxes) {
    counts.push_back(numel_of(box));
  }
  return counts;
}

std::int64_t total(const std::vector<std::int64_t>& counts) {
  std::int64_t sum = 0;
  for (const std::int64_t count : counts) {
    sum += count;
  }
  return sum;
}

const Box& own(const std::vector<Box>& boxes, const comm::Communicator& communicator) {
  return boxes[static_cast<std::size_t>(communicator.rank())];
}

/// Copies the parts of `local` (which holds `whole`) one after another into one row.
at::Tensor pack(
    const at::Tensor& local,
    const Box& whole,
    const std::vector<Box>& parts,
    const std::vector<std::int64_t>& counts
) {
  at::Tensor row = at::empty({total(counts)}, local.options());
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (counts[i] > 0) {
      row.narrow(0, offset, counts[i])
          .view(shape_of(parts[i]))
          .copy_(view_of(local, whole, parts[i]));
    }
    offset += counts[i];
  }
  return row;
}

/// The reverse of `pack`: `parts` cover `whole`.
at::Tensor unpack(
    const at::Tensor& row,
    const Box& whole,
    const std::vector<Box>& parts,
    const std::vector<std::int64_t>& counts
) {
  at::Tensor result = at::empty(shape_of(whole), row.options());
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (counts[i] > 0) {
      view_of(result, whole, parts[i])
          .copy_(row.narrow(0, offset, counts[i]).view(shape_of(parts[i])));
    }
    offset += counts[i];
  }
  return result;
}

/// Waits until the result may be read, and until the caller may write its tensor again if peers
/// read that one. A tensor of ours only lives until they are done, which the work sees to.
void finish(
    const comm::WorkPtr& work, const at::Tensor& input, const at::Tensor& local, bool is_owned
) {
  if (is_owned || !input.is_alias_of(local)) {
    work->wait();
  } else {
    work->wait_released();
  }
}

comm::ReduceOp op_of(Reduce reduce) {
  switch (reduce) {
    case Reduce::kMax:
      return comm::ReduceOp::kMax;
    case Reduce::kMin:
      return comm::ReduceOp::kMin;
    default:
      return comm::ReduceOp::kSum;
  }
}

void finish_average(const at::Tensor& tensor, Reduce reduce, const comm::Communicator& group) {
  if (reduce == Reduce::kAvg) {
    tensor.div_(group.size());
  }
}

}  // namespace

BoxGather::BoxGather(BoxExchange exchange)
    : exchange_(std::move(exchange)),
      counts_(counts_of(exchange_.before)),
      direct_(are_consecutive_runs(exchange_.before, exchange_.after.front())) {}

at::Tensor BoxGather::run(const at::Tensor& local, bool is_owned, const std::string& unit) const {
  const Box& whole = exchange_.after.front();
  comm::Communicator& communicator = *exchange_.communicator;
  const at::Tensor input = local.contiguous();
  if (direct_) {
    at::Tensor result = at::empty(shape_of(whole), local.options());
    finish(communicator.all_gather(result, input, counts_, unit), input, local, is_owned);
    return result;
  }
  const at::Tensor row = at::empty({total(counts_)}, local.options());
  finish(communicator.all_gather(row, input, counts_, unit), input, local, is_owned);
  return unpack(row, whole, exchange_.before, counts_);
}

BoxAllToAll::BoxAllToAll(BoxExchange exchange) : exchange_(std::move(exchange)) {
  const Box& before = own(exchange_.before, *exchange_.communicator);
  const Box& after = own(exchange_.after, *exchange_.communicator);
  for (std::size_t peer = 0; peer < exchange_.before.size(); ++peer) {
    sent_.push_back(intersect(before, exchange_.after[peer]));
    received_.push_back(intersect(exchange_.before[peer], after));
  }
  sent_counts_ = counts_of(sent_);
  received_counts_ = counts_of(received_);
  reads_in_place_ = are_consecutive_runs(sent_, before);
  writes_in_place_ = are_consecutive_runs(received_, after);
  HS_ASSERT(
      total(received_counts_) == numel_of(after),
      "dtensor.exchange: ",
      total(received_counts_),
      " elements arrive for a part of ",
      numel_of(after)
  );
}

at::Tensor BoxAllToAll::packed(const at::Tensor& local) const {
  return reads_in_place_
             ? local.contiguous()
             : pack(local, own(exchange_.before, *exchange_.communicator), sent_, sent_counts_);
}

at::Tensor BoxAllToAll::run(const at::Tensor& local, bool is_owned, const std::string& unit) const {
  const Box& after = own(exchange_.after, *exchange_.communicator);
  comm::Communicator& communicator = *exchange_.communicator;
  const at::Tensor input = packed(local);
  at::Tensor output = writes_in_place_ ? at::empty(shape_of(after), local.options())
                                       : at::empty({total(received_counts_)}, local.options());
  finish(
      communicator.all_to_all(output, input, received_counts_, sent_counts_, unit),
      input,
      local,
      is_owned
  );
  return writes_in_place_ ? output : unpack(output, after, received_, received_counts_);
}

BoxReduceScatter::BoxReduceScatter(BoxExchange exchange, Reduce reduce)
    : exchange_(std::move(exchange)),
      reduce_(reduce),
      counts_(counts_of(exchange_.after)),
      direct_(are_consecutive_runs(exchange_.after, exchange_.before.front())) {}

at::Tensor BoxReduceScatter::run(const at::Tensor& local, bool is_owned, const std::string& unit)
    const {
  comm::Communicator& communicator = *exchange_.communicator;
  const at::Tensor input = direct_
                               ? local.contiguous()
                               : pack(local, exchange_.before.front(), exchange_.after, counts_);
  at::Tensor output = at::empty(shape_of(own(exchange_.after, communicator)), local.options());
  finish(
      communicator.reduce_scatter(output, input, counts_, op_of(reduce_), unit),
      input,
      local,
      is_owned
  );
  finish_average(output, reduce_, communicator);
  return output;
}

at::Tensor reduce_all(
    comm::Communicator& communicator,
    const at::Tensor& local,
    bool is_owned,
    Reduce reduce,
    const std::string& unit
) {
  const bool in_place = is_owned && local.is_contiguous();
  at::Tensor result = in_place ? local : local.clone(at::MemoryFormat::Contiguous);
  communicator.all_reduce(result, op_of(reduce), unit)->wait();
  finish_average(result, reduce, communicator);
  return result;
}

}  // namespace hypershard::dtensor::internal
