// The joint norm of sharded gradients, and who holds the first value that is not a number.
#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <c10/core/GradMode.h>

#include "hypershard/core/error.h"
#include "hypershard/shard/engine.h"
#include "hypershard/shard/fully_shard.h"
#include "hypershard/shard/internal/agreement.h"

namespace hypershard::shard {

namespace {

// Keeps NaN, whatever the order of its arguments.
double max_or_nan(double a, double b) {
  return std::isnan(a) || std::isnan(b) ? std::numeric_limits<double>::quiet_NaN() : std::max(a, b);
}

// Joins the local values (sums of powers, or maxima) of all ranks along one axis, in rank order.
double join(comm::Communicator& axis, double mine, bool take_max) {
  at::Tensor own = at::empty({1}, at::TensorOptions().dtype(at::kDouble));
  own.fill_(mine);
  at::Tensor all = at::empty({axis.size()}, own.options());
  axis.all_gather(all, own, {}, "gradient norm")->wait_released();
  const double* values = all.const_data_ptr<double>();
  double joint = values[0];
  for (int r = 1; r < axis.size(); ++r) {
    joint = take_max ? max_or_nan(joint, values[r]) : joint + values[r];
  }
  return joint;
}

// Where ranks of the plan axes hold copies, the first one's is counted. Mostly that is all of an
// update tensor or none, and one pass; padding is zero.
std::vector<at::Tensor> counted_parts(const UpdateTensor& update, const at::Tensor& values) {
  const auto is_first = [](const UpdatePiece& piece) { return piece.is_first; };
  if (!values.defined() || values.numel() == 0 ||
      std::none_of(update.pieces.begin(), update.pieces.end(), is_first)) {
    return {};
  }
  if (std::all_of(update.pieces.begin(), update.pieces.end(), is_first)) {
    return {values};
  }
  std::vector<at::Tensor> parts;
  for (const UpdatePiece& piece : update.pieces) {
    if (piece.is_first) {
      parts.push_back(values.narrow(0, piece.offset, piece.range.numel()));
    }
  }
  return parts;
}

// Of all ranks' rows (index of a parameter or -1, whatever else), the one with the lowest index.
// Collective: `ranks`.
at::Tensor lowest_row(comm::Communicator& ranks, const at::Tensor& mine) {
  const at::Tensor all = internal::gather_rows(ranks, mine);
  const auto* rows = all.const_data_ptr<std::int64_t>();
  const std::int64_t width = mine.numel();
  std::int64_t best = 0;
  for (std::int64_t r = 1; r < ranks.size(); ++r) {
    const std::int64_t found = rows[r * width];
    if (found >= 0 && (rows[best * width] < 0 || found < rows[best * width])) {
      best = r;
    }
  }
  return all[best].clone();
}

std::int64_t first_non_finite(const UpdateTensor& update, const at::Tensor& values) {
  for (std::size_t i = 0; i < update.pieces.size(); ++i) {
    const UpdatePiece& piece = update.pieces[i];
    if (!at::isfinite(values.narrow(0, piece.offset, piece.range.numel())).all().item<bool>()) {
      return static_cast<std::int64_t>(i);
    }
  }
  return -1;
}

}  // namespace

double ShardedModel::clip_grad_norm_(double max_norm, double norm_type) const {
  const c10::NoGradGuard no_grad;
  HS_CHECK(max_norm >= 0, "shard: max_norm is ", max_norm, "; expected 0 or more");
  HS_CHECK(
      norm_type > 0, "shard: norm_type is ", norm_type, "; expected a positive number or infinity"
  );
  HS_CHECK(
      !engine_->update_in_backward,
      "shard: gradients cannot be clipped: the optimizer uses them up in backward",
      HS_HINT("call step_in_backward(false) on the optimizer")
  );
  const bool take_max = std::isinf(norm_type);
  double local = 0;
  for (const UpdateTensor& update : update_parameters()) {
    for (const at::Tensor& grad : counted_parts(update, update.tensor.grad())) {
      const double norm =
          at::linalg_vector_norm(grad, norm_type, c10::nullopt, false, at::kDouble).item<double>();
      local = take_max ? max_or_nan(local, norm) : local + std::pow(norm, norm_type);
    }
  }
  engine_->begin_gather();
  for (const DataAxis& axis : engine_->parallel().cuts) {
    if (axis.size > 1) {
      local = join(*axis.gather, local, take_max);
    }
  }
  if (comm::Communicator* plan = engine_->parallel().plan.get()) {
    local = join(*plan, local, take_max);
  }
  const double norm = take_max ? local : std::pow(local, 1.0 / norm_type);
  // The small term keeps the factor finite for a zero gradient; it is PyTorch's, so that both clip
  // alike.
  const double factor = max_norm / (norm + 1e-6);
  if (std::isfinite(norm) && factor < 1.0) {
    for (const UpdateTensor& update : update_parameters()) {
      at::Tensor grad = update.tensor.grad();
      if (grad.defined()) {
        grad.mul_(factor);
      }
    }
  }
  return norm;
}

std::string ShardedModel::find_non_finite() const {
  const c10::NoGradGuard no_grad;
  // Per rank: index of the parameter in order of registration (-1: none), whether it is the
  // gradient, and the rank.
  comm::Communicator& control = *engine_->parallel().control;
  at::Tensor mine = at::empty({3}, at::TensorOptions().dtype(at::kLong));
  auto* found = mine.mutable_data_ptr<std::int64_t>();
  found[0] = -1;
  found[1] = 0;
  found[2] = control.info().global_ranks[static_cast<std::size_t>(control.rank())];
  const std::vector<std::string> names = parameter_names();
  for (const UpdateTensor& update : update_parameters()) {
    for (const bool gradient : {false, true}) {
      const at::Tensor values = gradient ? update.tensor.grad() : update.tensor;
      const std::int64_t piece = values.defined() ? first_non_finite(update, values) : -1;
      if (piece >= 0 && found[0] < 0) {
        const auto at = std::find(
            names.begin(), names.end(), update.pieces[static_cast<std::size_t>(piece)].name
        );
        found[0] = at - names.begin();
        found[1] = gradient ? 1 : 0;
      }
    }
  }
  mine = lowest_row(control, mine);
  if (comm::Communicator* plan = engine_->parallel().plan.get()) {
    mine = lowest_row(*plan, mine);
  }
  const auto* worst = mine.const_data_ptr<std::int64_t>();
  if (worst[0] < 0) {
    return {};
  }
  return concat_text(
      "parameter '",
      names[static_cast<std::size_t>(worst[0])],
      "' (",
      worst[1] != 0 ? "gradient" : "value",
      ") on rank ",
      worst[2]
  );
}

}  // namespace hypershard::shard
