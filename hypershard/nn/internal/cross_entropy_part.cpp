// NOTE [one exchange]: a rank's log-sum-exp and its target logit (zero if the target is another
// rank's) say all that the others need of a row, so one all-gather of both takes the place of
// reductions of maximum, sum and target logit. Every rank then joins them in rank order, which
// gives the same bits on all.
#include "hypershard/nn/internal/cross_entropy_part.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include "hypershard/comm/communicator.h"
#include "hypershard/comm/work.h"
#include "hypershard/core/error.h"
#include "hypershard/nn/internal/cpu_kernels.h"
#include "hypershard/nn/internal/kernel_call.h"
#include "hypershard/nn/internal/layer_rules.h"

namespace hypershard::nn::internal {
namespace {

using Result = std::tuple<at::Tensor, at::Tensor>;

/// [2, rows] of this rank -> [ranks, 2, rows].
at::Tensor exchanged(const at::Tensor& own, const RowPart& part) {
  if (part.ranks == nullptr) {
    return own.unsqueeze(0);
  }
  const auto all = at::empty({part.ranks->size(), own.size(0), own.size(1)}, own.options());
  part.ranks->all_gather(all, own, {}, "cross_entropy")->wait();
  return all;
}

// Any device and dtype; the oracle of the fused kernel.
Result forward_composite(
    const at::Tensor& logits, const at::Tensor& targets, const RowPartPtr& part
) {
  const auto wide = logits.to(compute_dtype(logits.scalar_type()));
  const auto local = targets - part->first;
  const auto is_here = targets.ge(0).logical_and(local.ge(0)).logical_and(local.lt(part->count));
  auto at_target = at::zeros(targets.sizes(), wide.options());
  if (part->count > 0) {
    const auto column = local.clamp(0, part->count - 1).unsqueeze(1);
    at_target = at::where(is_here, wide.gather(1, column).squeeze(1), at_target);
  }
  const auto all = exchanged(at::stack({at::logsumexp(wide, {1}), at_target}), *part);
  const auto log_sum_exp = at::logsumexp(all.select(1, 0), {0});
  const auto kept = targets.ge(0);
  const auto losses = (log_sum_exp - all.select(1, 1).sum(0)).masked_fill(kept.logical_not(), 0);
  return {losses.sum() / kept.sum(), log_sum_exp};
}

template <class T>
void run_part(
    const at::Tensor& logits, const at::Tensor& targets, const RowPart& part, const at::Tensor& own
) {
  const CrossEntropyPart<T> args{
      data_of<T>(logits),
      data_of<std::int64_t>(targets),
      mutable_data_of<Compute<T>>(own),
      mutable_data_of<Compute<T>>(own) + own.size(1),
      part.count,
      part.first
  };
  for_rows(logits.size(0), part.count, [&](std::int64_t begin, std::int64_t end) {
    run_cross_entropy_part(args, begin, end);
  });
}

/// Log-sum-exp of log-sum-exps. A NaN among them stays.
double joined(const std::vector<double>& parts) {
  double largest = -std::numeric_limits<double>::infinity();
  for (const double part : parts) {
    largest = part > largest ? part : largest;
  }
  double sum = 0;
  for (const double part : parts) {
    sum += part == largest ? 1 : std::exp(part - largest);
  }
  return largest + std::log(sum);
}

/// Joins [ranks, 2, rows] into each row's log-sum-exp and loss.
template <class A>
void join(
    const at::Tensor& all,
    const std::int64_t* targets,
    const at::Tensor& log_sum_exp,
    std::vector<double>& losses
) {
  const auto ranks = static_cast<std::size_t>(all.size(0));
  const std::size_t rows = losses.size();
  const auto* data = data_of<A>(all);
  auto* result = mutable_data_of<A>(log_sum_exp);
  std::vector<double> parts(ranks);
  for (std::size_t row = 0; row < rows; ++row) {
    double at_target = 0;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      parts[rank] = static_cast<double>(data[2 * rank * rows + row]);
      at_target += static_cast<double>(data[(2 * rank + 1) * rows + row]);
    }
    const double sum = targets[row] < 0 ? 0 : joined(parts);
    result[row] = static_cast<A>(sum);
    losses[row] = targets[row] < 0 ? 0 : sum - at_target;
  }
}

Result forward_cpu(
    const at::Tensor& logits_in, const at::Tensor& targets_in, const RowPartPtr& part
) {
  check_targets(targets_in, part->total);
  if (!is_kernel_dtype(logits_in.scalar_type())) {
    return forward_composite(logits_in, targets_in, part);
  }
  const auto logits = logits_in.contiguous();
  const auto targets = targets_in.contiguous();
  const std::int64_t rows = logits.size(0);
  const auto options = logits.options().dtype(compute_dtype(logits.scalar_type()));
  const auto own = at::empty({2, rows}, options);
  with_element_type(logits.scalar_type(), [&](auto element) {
    run_part<decltype(element)>(logits, targets, *part, own);
  });
  const auto all = exchanged(own, *part);
  const auto log_sum_exp = at::empty({rows}, options);
  std::vector<double> losses(static_cast<std::size_t>(rows));
  const auto* target_data = data_of<std::int64_t>(targets);
  if (options.dtype() == at::kDouble) {
    join<double>(all, target_data, log_sum_exp, losses);
  } else {
    join<float>(all, target_data, log_sum_exp, losses);
  }
  return {mean_of_kept(losses, targets, options), log_sum_exp};
}

// Meta: libtorch's logsumexp and gather have no kernels there.
Result forward_meta(
    const at::Tensor& logits, const at::Tensor& targets, const RowPartPtr& /*part*/
) {
  const auto options = logits.options().dtype(compute_dtype(logits.scalar_type()));
  return {at::empty({}, options), at::empty(targets.sizes(), options)};
}

TORCH_LIBRARY_FRAGMENT(hypershard, m) {
  // The part travels through the dispatcher as what it is: no registry of numbers, no lifetimes.
  m.class_<RowPart>("RowPart");
  dtensor::register_op_rule(
      "hypershard::cross_entropy_part_forward", cross_entropy_part_forward_rule
  );
  m.def(
      "cross_entropy_part_forward(Tensor logits, Tensor targets, "
      "__torch__.torch.classes.hypershard.RowPart part) -> (Tensor, Tensor)"
  );
}
TORCH_LIBRARY_IMPL(hypershard, CPU, m) {
  m.impl("cross_entropy_part_forward", forward_cpu);
}
TORCH_LIBRARY_IMPL(hypershard, Meta, m) {
  m.impl("cross_entropy_part_forward", forward_meta);
}
TORCH_LIBRARY_IMPL(hypershard, CompositeExplicitAutograd, m) {
  m.impl("cross_entropy_part_forward", forward_composite);
}
TORCH_LIBRARY_IMPL(hypershard, Autograd, m) {
  m.impl("cross_entropy_part_forward", torch::CppFunction::makeFallthrough());
}

}  // namespace

Result cross_entropy_part_forward(
    const at::Tensor& logits, const at::Tensor& targets, const RowPartPtr& part
) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("hypershard::cross_entropy_part_forward", "")
                             .typed<decltype(forward_composite)>();
  return op.call(logits, targets, part);
}

}  // namespace hypershard::nn::internal
