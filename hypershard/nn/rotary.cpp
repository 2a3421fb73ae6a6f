// Rotary embedding: the operator hypershard::rotate and its autograd function.
// The gradient is the rotation by minus the angle, so one operator serves both directions and any
// order of derivatives.
#include "hypershard/nn/rotary.h"

#include <cstdint>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/pow.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "hypershard/core/error.h"
#include "hypershard/nn/internal/cpu_kernels.h"
#include "hypershard/nn/internal/kernel_call.h"
#include "hypershard/nn/internal/layer_rules.h"

namespace hypershard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Any device and dtype; the oracle of the fused kernel.
at::Tensor rotate_composite(
    const at::Tensor& x, const at::Tensor& cosine, const at::Tensor& sine, bool backwards
) {
  const auto wide = x.to(internal::compute_dtype(x.scalar_type()));
  const auto halves = wide.chunk(2, -1);
  const auto c = cosine.unsqueeze(1);
  const auto s = backwards ? sine.unsqueeze(1).neg() : sine.unsqueeze(1);
  return at::cat({halves[0] * c - halves[1] * s, halves[0] * s + halves[1] * c}, -1)
      .to(x.scalar_type());
}

bool fits_kernel(const at::Tensor& x, const at::Tensor& cosine, const at::Tensor& sine) {
  return internal::is_kernel_dtype(x.scalar_type()) && x.stride(-1) == 1 &&
         cosine.is_contiguous() && sine.is_contiguous() &&
         cosine.scalar_type() == internal::compute_dtype(x.scalar_type());
}

at::Tensor rotate_cpu(
    const at::Tensor& x, const at::Tensor& cosine, const at::Tensor& sine, bool backwards
) {
  if (!fits_kernel(x, cosine, sine)) {
    return rotate_composite(x, cosine, sine, backwards);
  }
  const std::int64_t batch = x.size(0);
  const std::int64_t positions = x.size(1);
  const std::int64_t row_elements = x.size(2) * x.size(3);
  const auto y = at::empty(x.sizes(), x.options());
  internal::with_element_type(x.scalar_type(), [&](auto element) {
    using T = decltype(element);
    using A = internal::Compute<T>;
    for (std::int64_t b = 0; b < batch; ++b) {
      const internal::Rotate<T> args{
          internal::data_of<T>(x) + b * x.stride(0),
          internal::mutable_data_of<T>(y) + b * positions * row_elements,
          internal::data_of<A>(cosine),
          internal::data_of<A>(sine),
          x.stride(1),
          x.stride(2),
          x.size(2),
          x.size(3) / 2,
          backwards
      };
      internal::for_rows(positions, row_elements, [&](std::int64_t begin, std::int64_t end) {
        internal::run_rotate(args, begin, end);
      });
    }
  });
  return y;
}

TORCH_LIBRARY_FRAGMENT(hypershard, m) {
  dtensor::register_op_rule("hypershard::rotate", internal::rotate_rule);
  m.def("rotate(Tensor x, Tensor cosine, Tensor sine, bool backwards) -> Tensor");
}
TORCH_LIBRARY_IMPL(hypershard, CPU, m) {
  m.impl("rotate", rotate_cpu);
}
TORCH_LIBRARY_IMPL(hypershard, CompositeExplicitAutograd, m) {
  m.impl("rotate", rotate_composite);
}
TORCH_LIBRARY_IMPL(hypershard, Autograd, m) {
  m.impl("rotate", torch::CppFunction::makeFallthrough());
}

at::Tensor call_rotate(
    const at::Tensor& x, const at::Tensor& cosine, const at::Tensor& sine, bool backwards
) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("hypershard::rotate", "")
                             .typed<decltype(rotate_composite)>();
  return op.call(x, cosine, sine, backwards);
}

at::Tensor rotate_differentiably(
    const at::Tensor& x, const at::Tensor& cosine, const at::Tensor& sine, bool backwards
);

struct RotateFunction : torch::autograd::Function<RotateFunction> {
  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& x,
      const at::Tensor& cosine,
      const at::Tensor& sine,
      bool backwards
  ) {
    ctx->save_for_backward({cosine, sine});
    ctx->saved_data["backwards"] = backwards;
    return call_rotate(x, cosine, sine, backwards);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const bool backwards = ctx->saved_data.at("backwards").toBool();
    return {
        rotate_differentiably(grads[0], saved[0], saved[1], !backwards),
        at::Tensor(),
        at::Tensor(),
        at::Tensor()
    };
  }
};

at::Tensor rotate_differentiably(
    const at::Tensor& x, const at::Tensor& cosine, const at::Tensor& sine, bool backwards
) {
  return at::GradMode::is_enabled() ? RotateFunction::apply(x, cosine, sine, backwards)
                                    : call_rotate(x, cosine, sine, backwards);
}

}  // namespace

RotaryTable RotaryTable::narrow(std::int64_t begin, std::int64_t count) const {
  return {cosine.narrow(0, begin, count), sine.narrow(0, begin, count)};
}

RotaryTable make_rotary_table(
    std::int64_t positions,
    std::int64_t head_dim,
    double theta,
    at::ScalarType dtype,
    at::Device device
) {
  HS_CHECK(
      head_dim > 0 && head_dim % 2 == 0,
      "nn.rotary: head_dim must be positive and even (got ",
      head_dim,
      ")"
  );
  const auto options = at::TensorOptions().dtype(at::kDouble);
  const auto exponents = at::arange(head_dim / 2, options) * (-2.0 / static_cast<double>(head_dim));
  const auto angles =
      at::arange(positions, options).unsqueeze(1) * at::pow(at::Scalar(theta), exponents);
  const auto table_dtype = internal::compute_dtype(dtype);
  return {angles.cos().to(device, table_dtype), angles.sin().to(device, table_dtype)};
}

at::Tensor rotate(const at::Tensor& x, const RotaryTable& table) {
  HS_CHECK(
      x.dim() == 4 && table.cosine.dim() == 2 && table.cosine.size(0) == x.size(1) &&
          2 * table.cosine.size(1) == x.size(3) && table.sine.sizes() == table.cosine.sizes(),
      "nn.rotary: input of shape ",
      x.sizes(),
      " does not fit a table of shape ",
      table.cosine.sizes(),
      " (expected [batch, positions, heads, head_dim] and [positions, head_dim / 2])"
  );
  return rotate_differentiably(x, table.cosine, table.sine, /*backwards=*/false);
}

}  // namespace hypershard::nn
