// Cross entropy: the operators hypershard::cross_entropy_forward and _backward and their autograd
// function. They are dispatched operators, so that traces and the plan's validation see them like
// ATen's own.
#include "hypershard/nn/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/one_hot.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "hypershard/core/error.h"
#include "hypershard/nn/internal/cpu_kernels.h"
#include "hypershard/nn/internal/cross_entropy_part.h"
#include "hypershard/nn/internal/kernel_call.h"
#include "hypershard/nn/internal/layer_rules.h"

namespace hypershard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor widened(const at::Tensor& tensor) {
  return tensor.to(internal::compute_dtype(tensor.scalar_type()));
}

// Any device and dtype; the oracle of the fused kernels. Logits [rows, classes], targets [rows].
std::tuple<at::Tensor, at::Tensor> forward_composite(
    const at::Tensor& logits, const at::Tensor& targets
) {
  const auto wide = widened(logits);
  const auto log_sum_exp = at::logsumexp(wide, {1});
  const auto kept = targets.ge(0);
  const auto at_target = wide.gather(1, targets.clamp_min(0).unsqueeze(1)).squeeze(1);
  const auto loss = ((log_sum_exp - at_target) * kept).sum() / kept.sum();
  return {loss, log_sum_exp};
}

at::Tensor backward_composite(
    const at::Tensor& grad,
    const at::Tensor& logits,
    const at::Tensor& targets,
    const at::Tensor& log_sum_exp,
    std::int64_t first_class
) {
  const std::int64_t classes = logits.size(1);
  if (classes == 0) {
    return at::empty_like(logits);
  }
  const auto wide = widened(logits);
  const auto kept = targets.ge(0);
  const auto local = targets - first_class;
  const auto is_here = local.ge(0).logical_and(local.lt(classes)).unsqueeze(1);
  const auto one_hot = at::one_hot(local.clamp(0, classes - 1), classes) * is_here;
  const auto scale = grad / kept.sum() * kept.unsqueeze(1);
  return ((at::exp(wide - log_sum_exp.unsqueeze(1)) - one_hot) * scale).to(logits.scalar_type());
}

std::int64_t count_kept(const std::int64_t* targets, std::int64_t rows) {
  return std::count_if(targets, targets + rows, [](std::int64_t target) { return target >= 0; });
}

std::tuple<at::Tensor, at::Tensor> forward_cpu(
    const at::Tensor& logits_in, const at::Tensor& targets_in
) {
  const auto targets = targets_in.contiguous();
  const std::int64_t rows = logits_in.size(0);
  const std::int64_t classes = logits_in.size(1);
  const auto* target_data = internal::data_of<std::int64_t>(targets);
  internal::check_targets(targets, classes);
  if (!internal::is_kernel_dtype(logits_in.scalar_type())) {
    return forward_composite(logits_in, targets);
  }
  const auto logits = logits_in.contiguous();
  const auto wide_options = logits.options().dtype(internal::compute_dtype(logits.scalar_type()));
  const auto log_sum_exp = at::empty({rows}, wide_options);
  std::vector<double> row_losses(static_cast<std::size_t>(rows));
  internal::with_element_type(logits.scalar_type(), [&](auto element) {
    using T = decltype(element);
    const internal::CrossEntropyForward<T> args{
        internal::data_of<T>(logits),
        target_data,
        internal::mutable_data_of<internal::Compute<T>>(log_sum_exp),
        row_losses.data(),
        classes
    };
    internal::for_rows(rows, classes, [&](std::int64_t begin, std::int64_t end) {
      internal::run_cross_entropy_forward(args, begin, end);
    });
  });
  return {internal::mean_of_kept(row_losses, targets, wide_options), log_sum_exp};
}

at::Tensor backward_cpu(
    const at::Tensor& grad,
    const at::Tensor& logits_in,
    const at::Tensor& targets_in,
    const at::Tensor& log_sum_exp,
    std::int64_t first_class
) {
  if (!internal::is_kernel_dtype(logits_in.scalar_type())) {
    return backward_composite(grad, logits_in, targets_in, log_sum_exp, first_class);
  }
  const auto logits = logits_in.contiguous();
  const auto targets = targets_in.contiguous();
  const std::int64_t rows = logits.size(0);
  const std::int64_t classes = logits.size(1);
  const auto* target_data = internal::data_of<std::int64_t>(targets);
  const double scale = grad.item<double>() / static_cast<double>(count_kept(target_data, rows));
  const auto grad_logits = at::empty_like(logits);
  internal::with_element_type(logits.scalar_type(), [&](auto element) {
    using T = decltype(element);
    const internal::CrossEntropyBackward<T> args{
        internal::data_of<T>(logits),
        target_data,
        internal::data_of<internal::Compute<T>>(log_sum_exp),
        internal::mutable_data_of<T>(grad_logits),
        classes,
        first_class,
        scale
    };
    internal::for_rows(rows, classes, [&](std::int64_t begin, std::int64_t end) {
      internal::run_cross_entropy_backward(args, begin, end);
    });
  });
  return grad_logits;
}

// Meta: libtorch's logsumexp and gather have no kernels there.
std::tuple<at::Tensor, at::Tensor> forward_meta(
    const at::Tensor& logits, const at::Tensor& targets
) {
  const auto options = logits.options().dtype(internal::compute_dtype(logits.scalar_type()));
  return {at::empty({}, options), at::empty(targets.sizes(), options)};
}

TORCH_LIBRARY_FRAGMENT(hypershard, m) {
  dtensor::register_op_rule(
      "hypershard::cross_entropy_forward", internal::cross_entropy_forward_rule
  );
  m.def("cross_entropy_forward(Tensor logits, Tensor targets) -> (Tensor, Tensor)");
  m.def(
      "cross_entropy_backward(Tensor grad, Tensor logits, Tensor targets, Tensor log_sum_exp, "
      "int first_class) -> Tensor"
  );
}
TORCH_LIBRARY_IMPL(hypershard, CPU, m) {
  m.impl("cross_entropy_forward", forward_cpu);
  m.impl("cross_entropy_backward", backward_cpu);
}
TORCH_LIBRARY_IMPL(hypershard, Meta, m) {
  m.impl("cross_entropy_forward", forward_meta);
}
TORCH_LIBRARY_IMPL(hypershard, CompositeExplicitAutograd, m) {
  m.impl("cross_entropy_forward", forward_composite);
  m.impl("cross_entropy_backward", backward_composite);
}
TORCH_LIBRARY_IMPL(hypershard, Autograd, m) {
  m.impl("cross_entropy_forward", torch::CppFunction::makeFallthrough());
  m.impl("cross_entropy_backward", torch::CppFunction::makeFallthrough());
}

std::tuple<at::Tensor, at::Tensor> call_forward(
    const at::Tensor& logits, const at::Tensor& targets
) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("hypershard::cross_entropy_forward", "")
                             .typed<decltype(forward_composite)>();
  return op.call(logits, targets);
}

at::Tensor call_backward(
    const at::Tensor& grad,
    const at::Tensor& logits,
    const at::Tensor& targets,
    const at::Tensor& log_sum_exp,
    std::int64_t first_class
) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("hypershard::cross_entropy_backward", "")
                             .typed<decltype(backward_composite)>();
  return op.call(grad, logits, targets, log_sum_exp, first_class);
}

std::tuple<at::Tensor, at::Tensor> forward_of(
    const at::Tensor& logits, const at::Tensor& targets, const RowPartPtr& part
) {
  return part == nullptr ? call_forward(logits, targets)
                         : internal::cross_entropy_part_forward(logits, targets, part);
}

constexpr const char* kFirstClass = "first_class";  // none: the classes are whole

struct CrossEntropyFunction : torch::autograd::Function<CrossEntropyFunction> {
  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& logits,
      const at::Tensor& targets,
      const RowPartPtr& part
  ) {
    auto [loss, log_sum_exp] = forward_of(logits, targets, part);
    ctx->save_for_backward({logits, targets, log_sum_exp});
    ctx->saved_data[kFirstClass] =
        part == nullptr ? std::optional<std::int64_t>() : std::optional(part->first);
    return loss;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto first_class = ctx->saved_data.at(kFirstClass).toOptional<std::int64_t>();
    return {
        at::GradMode::is_enabled()
            ? differentiable(grads[0], saved[0], saved[1], first_class)
            : call_backward(grads[0], saved[0], saved[1], saved[2], first_class.value_or(0)),
        at::Tensor(),
        at::Tensor()
    };
  }

  static at::Tensor differentiable(
      const at::Tensor& grad,
      const at::Tensor& logits,
      const at::Tensor& targets,
      const std::optional<std::int64_t>& first_class
  ) {
    HS_SUPPORTED(
        !first_class.has_value(),
        "nn.cross_entropy: backward with create_graph=true of logits whose classes are cut over "
        "ranks",
        HS_HINT("gather the logits for second derivatives: a boundary with Replicate on the head's "
                "output")
    );
    const auto log_sum_exp = at::logsumexp(widened(logits), {1});
    return backward_composite(grad, logits, targets, log_sum_exp, 0);
  }
};

}  // namespace

namespace internal {

void check_targets(const at::Tensor& targets_in, std::int64_t classes) {
  const auto targets = targets_in.contiguous();
  const auto* data = data_of<std::int64_t>(targets);
  for (std::int64_t row = 0; row < targets.numel(); ++row) {
    HS_CHECK(
        data[row] < classes,
        "nn.cross_entropy: the target of row ",
        row,
        " is ",
        data[row],
        " (expected below the number of classes, ",
        classes,
        ")",
        HS_HINT("is the model's vocabulary as large as the tokenizer's?")
    );
  }
}

at::Tensor mean_of_kept(
    const std::vector<double>& row_losses, const at::Tensor& targets, const at::TensorOptions& as
) {
  const std::int64_t kept = count_kept(data_of<std::int64_t>(targets), targets.numel());
  double sum = 0;
  for (const double loss : row_losses) {
    sum += loss;
  }
  return at::scalar_tensor(
      kept == 0 ? std::numeric_limits<double>::quiet_NaN() : sum / static_cast<double>(kept), as
  );
}

}  // namespace internal

at::Tensor cross_entropy(
    const at::Tensor& logits, const at::Tensor& targets, const RowPartPtr& rows_of_head
) {
  // A boundary behind the head may have gathered the logits.
  const bool is_whole =
      rows_of_head == nullptr || (logits.dim() > 0 && logits.size(-1) == rows_of_head->total);
  const RowPartPtr part = is_whole ? RowPartPtr() : rows_of_head;
  HS_CHECK(
      part == nullptr || (logits.dim() > 0 && logits.size(-1) == part->count),
      "nn.cross_entropy: logits of shape ",
      logits.sizes(),
      " come from a projection of which this rank has ",
      part == nullptr ? 0 : part->count,
      " of ",
      part == nullptr ? 0 : part->total,
      " rows (expected one of these as the last size)"
  );
  HS_CHECK(
      logits.dim() >= 1 &&
          logits.sizes().slice(0, static_cast<std::size_t>(logits.dim() - 1)) == targets.sizes() &&
          (part != nullptr || logits.size(-1) > 0),
      "nn.cross_entropy: logits of shape ",
      logits.sizes(),
      " do not fit targets of shape ",
      targets.sizes(),
      " (expected [..., classes] and [...])"
  );
  HS_CHECK(
      targets.scalar_type() == at::kLong,
      "nn.cross_entropy: targets of dtype ",
      targets.scalar_type(),
      " (expected Long)"
  );
  const auto rows = part != nullptr && part->count == 0 ? logits.reshape({targets.numel(), 0})
                                                        : logits.reshape({-1, logits.size(-1)});
  const auto row_targets = targets.reshape({-1});
  if (!at::GradMode::is_enabled()) {
    return std::get<0>(forward_of(rows, row_targets, part));
  }
  return CrossEntropyFunction::apply(rows, row_targets, part);
}

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets) {
  return cross_entropy(logits, targets, RowPartPtr());
}

}  // namespace hypershard::nn
