// The table from parameters to their rows' parts.
#include "hypershard/nn/row_part.h"

#include <cstddef>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/accumulate.h>

#include "hypershard/comm/communicator.h"
#include "hypershard/comm/work.h"
#include "hypershard/core/error.h"
#include "hypershard/nn/internal/kernel_call.h"
#include "hypershard/nn/internal/parameter_table.h"

namespace hypershard::nn {
namespace {

using PartTable = internal::ParameterTable<c10::weak_intrusive_ptr<RowPart>>;

// Never destroyed: parameters with static lifetime may outlive any order of destruction.
PartTable& part_table() {
  static auto* table = new PartTable;
  return *table;
}

/// How many rows each rank holds.
std::vector<std::int64_t> counts_of(const RowPart& part) {
  const auto counts = at::empty({part.ranks->size()}, at::TensorOptions().dtype(at::kLong));
  const auto own = at::scalar_tensor(part.count, at::TensorOptions().dtype(at::kLong));
  part.ranks->all_gather(counts, own.view({1}), {}, "rows")->wait();
  const auto* data = internal::data_of<std::int64_t>(counts);
  return {data, data + counts.numel()};
}

}  // namespace

RowPart::RowPart(
    std::int64_t first_in,
    std::int64_t count_in,
    std::int64_t total_in,
    std::vector<int> axes_in,
    std::shared_ptr<comm::Communicator> ranks_in
)
    : first(first_in),
      count(count_in),
      total(total_in),
      axes(std::move(axes_in)),
      ranks(std::move(ranks_in)) {}

void set_row_part(const at::Tensor& param, const RowPartPtr& part) {
  HS_CHECK(param.defined(), "nn.row_part: the parameter is an undefined tensor");
  part_table().set(param, part);
}

RowPartPtr row_part_of(const at::Tensor& param) {
  auto part = part_table().find(param);
  HS_CHECK(
      part == nullptr || (param.dim() > 0 && param.size(0) == part->count),
      "nn.row_part: a parameter of shape ",
      param.sizes(),
      " is said to be rows ",
      part->first,
      " to ",
      part->first + part->count,
      " of ",
      part->total,
      HS_HINT("give a parameter that was cut by a plan no other rows afterwards")
  );
  return part;
}

at::Tensor gather_columns(const at::Tensor& columns, const RowPart& part) {
  HS_CHECK(
      columns.dim() > 0 && columns.size(-1) == part.count && part.ranks != nullptr,
      "nn.row_part: columns of shape ",
      columns.sizes(),
      " cannot be gathered (expected [..., ",
      part.count,
      "] and a part that has ranks)"
  );
  const at::NoGradGuard no_grad;
  const auto counts = counts_of(part);
  const std::int64_t num_rows =
      c10::multiply_integers(columns.sizes().slice(0, static_cast<std::size_t>(columns.dim() - 1)));
  const auto rows = columns.reshape({num_rows, part.count});
  auto sent = counts;
  for (auto& each : sent) {
    each *= rows.size(0);
  }
  const auto gathered = at::empty({rows.size(0) * part.total}, columns.options());
  part.ranks->all_gather(gathered, rows.contiguous().view({-1}), sent, "columns")->wait();
  const auto result = at::empty({rows.size(0), part.total}, columns.options());
  std::int64_t column = 0;
  std::int64_t offset = 0;
  for (std::size_t rank = 0; rank < counts.size(); ++rank) {
    result.narrow(1, column, counts[rank])
        .copy_(gathered.narrow(0, offset, sent[rank]).view({rows.size(0), counts[rank]}));
    column += counts[rank];
    offset += sent[rank];
  }
  auto shape = columns.sizes().vec();
  shape.back() = part.total;
  return result.view(shape);
}

}  // namespace hypershard::nn
