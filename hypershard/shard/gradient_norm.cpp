// The joint norm of sharded gradients, and who holds the first value that is not a number.
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
    const at::Tensor& grad = update.tensor.grad();
    if (grad.defined() && grad.numel() > 0) {
      const double norm =
          at::linalg_vector_norm(grad, norm_type, c10::nullopt, false, at::kDouble).item<double>();
      local = take_max ? max_or_nan(local, norm) : local + std::pow(norm, norm_type);
    }
  }
  for (const DataAxis& axis : engine_->parallel().cuts) {
    if (axis.size > 1) {
      local = join(*axis.gather, local, take_max);
    }
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
  // Per rank: index of the parameter in order of registration (-1: none), and whether it is the
  // gradient.
  at::Tensor mine = at::empty({2}, at::TensorOptions().dtype(at::kLong));
  auto* found = mine.mutable_data_ptr<std::int64_t>();
  found[0] = -1;
  found[1] = 0;
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
  comm::Communicator& ranks = *engine_->parallel().control;
  const at::Tensor all = internal::gather_rows(ranks, mine);
  const auto* rows = all.const_data_ptr<std::int64_t>();
  int best = -1;
  for (int r = 0; r < ranks.size(); ++r) {
    if (rows[2 * r] >= 0 && (best < 0 || rows[2 * r] < rows[2 * best])) {
      best = r;
    }
  }
  if (best < 0) {
    return {};
  }
  return concat_text(
      "parameter '",
      names[static_cast<std::size_t>(rows[2 * best])],
      "' (",
      rows[2 * best + 1] != 0 ? "gradient" : "value",
      ") on rank ",
      ranks.info().global_ranks[static_cast<std::size_t>(best)]
  );
}

}  // namespace hypershard::shard
