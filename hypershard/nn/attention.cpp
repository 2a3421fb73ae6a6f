// Causal attention: the operators hypershard::attention_forward and _backward and their autograd
// function. They are dispatched operators, so that traces and the plan's validation see them like
// ATen's own.
#include "hypershard/nn/attention.h"

#include <cmath>
#include <cstdint>
#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "hypershard/core/error.h"
#include "hypershard/nn/internal/attention_kernel.h"
#include "hypershard/nn/internal/kernel_call.h"
#include "hypershard/nn/internal/layer_rules.h"

namespace hypershard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor attention_of_aten(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const auto out = at::scaled_dot_product_attention(
      q.transpose(1, 2),
      k.transpose(1, 2),
      v.transpose(1, 2),
      /*attn_mask=*/{},
      /*dropout_p=*/0.0,
      /*is_causal=*/true,
      /*scale=*/std::nullopt,
      /*enable_gqa=*/q.size(2) != k.size(2)
  );
  return out.transpose(1, 2).contiguous();
}

internal::AttentionShape shape_of(const at::Tensor& q, const at::Tensor& k) {
  return {
      .positions = q.size(1),
      .heads = q.size(2),
      .kv_heads = k.size(2),
      .head_dim = q.size(3),
      .scale = 1 / std::sqrt(static_cast<double>(q.size(3)))
  };
}

bool fits_kernel(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  if (q.is_meta()) {
    return true;  // libtorch's attention does not take them; the shapes are the same
  }
  const auto dtype = q.scalar_type();
  return q.device().is_cpu() && internal::is_kernel_dtype(dtype) && k.scalar_type() == dtype &&
         v.scalar_type() == dtype &&
         internal::attention_kernel_fits(shape_of(q, k), dtype == at::kDouble);
}

template <class T>
internal::HeadsView<const T> view_of(const at::Tensor& heads) {
  return {internal::data_of<T>(heads), heads.stride(0), heads.stride(1), heads.stride(2)};
}

template <class T>
internal::HeadsView<T> mutable_view_of(const at::Tensor& heads) {
  return {internal::mutable_data_of<T>(heads), heads.stride(0), heads.stride(1), heads.stride(2)};
}

at::Tensor with_contiguous_heads(const at::Tensor& heads) {
  return heads.stride(-1) == 1 ? heads : heads.contiguous();
}

/// Splits the key heads of all sequences over threads.
template <class Body>
void for_key_heads(const at::Tensor& k, const Body& body) {
  internal::for_rows(k.size(0) * k.size(2), internal::kGrain, body);
}

std::tuple<at::Tensor, at::Tensor> forward_meta(
    const at::Tensor& q, const at::Tensor& /*k*/, const at::Tensor& /*v*/
) {
  const auto statistics = q.options().dtype(internal::compute_dtype(q.scalar_type()));
  return {
      at::empty(q.sizes(), q.options()), at::empty({q.size(0), q.size(2), q.size(1)}, statistics)
  };
}

std::tuple<at::Tensor, at::Tensor> forward_cpu(
    const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in
) {
  auto [out, log_sum_exp] = forward_meta(q_in, k_in, v_in);
  const auto q = with_contiguous_heads(q_in);
  const auto k = with_contiguous_heads(k_in);
  const auto v = with_contiguous_heads(v_in);
  internal::with_element_type(
      q.scalar_type(),
      [&, &out = out, &log_sum_exp = log_sum_exp](auto element) {
        using T = decltype(element);
        const internal::AttentionForward<T> args{
            shape_of(q, k),
            view_of<T>(q),
            view_of<T>(k),
            view_of<T>(v),
            mutable_view_of<T>(out),
            internal::mutable_data_of<internal::Compute<T>>(log_sum_exp)
        };
        for_key_heads(k, [&](std::int64_t begin, std::int64_t end) {
          internal::run_attention_forward(args, begin, end);
        });
      }
  );
  return {out, log_sum_exp};
}

using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

ThreeTensors backward_meta(
    const at::Tensor& /*grad_out*/,
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const at::Tensor& /*out*/,
    const at::Tensor& /*log_sum_exp*/
) {
  return {
      at::empty(q.sizes(), q.options()),
      at::empty(k.sizes(), k.options()),
      at::empty(v.sizes(), v.options())
  };
}

ThreeTensors backward_cpu(
    const at::Tensor& grad_in,
    const at::Tensor& q_in,
    const at::Tensor& k_in,
    const at::Tensor& v_in,
    const at::Tensor& out,
    const at::Tensor& log_sum_exp
) {
  auto grads = backward_meta(grad_in, q_in, k_in, v_in, out, log_sum_exp);
  const auto grad_out = with_contiguous_heads(grad_in);
  const auto q = with_contiguous_heads(q_in);
  const auto k = with_contiguous_heads(k_in);
  const auto v = with_contiguous_heads(v_in);
  internal::with_element_type(q.scalar_type(), [&](auto element) {
    using T = decltype(element);
    const internal::AttentionBackward<T> args{
        shape_of(q, k),
        view_of<T>(q),
        view_of<T>(k),
        view_of<T>(v),
        view_of<T>(out),
        view_of<T>(grad_out),
        mutable_view_of<T>(std::get<0>(grads)),
        mutable_view_of<T>(std::get<1>(grads)),
        mutable_view_of<T>(std::get<2>(grads)),
        internal::data_of<internal::Compute<T>>(log_sum_exp)
    };
    for_key_heads(k, [&](std::int64_t begin, std::int64_t end) {
      internal::run_attention_backward(args, begin, end);
    });
  });
  return grads;
}

TORCH_LIBRARY_FRAGMENT(hypershard, m) {
  dtensor::register_op_rule("hypershard::attention_forward", internal::attention_forward_rule);
  m.def("attention_forward(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)");
  m.def(
      "attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor "
      "log_sum_exp) "
      "-> (Tensor, Tensor, Tensor)"
  );
}
TORCH_LIBRARY_IMPL(hypershard, CPU, m) {
  m.impl("attention_forward", forward_cpu);
  m.impl("attention_backward", backward_cpu);
}
TORCH_LIBRARY_IMPL(hypershard, Meta, m) {
  m.impl("attention_forward", forward_meta);
  m.impl("attention_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(hypershard, Autograd, m) {
  m.impl("attention_forward", torch::CppFunction::makeFallthrough());
  m.impl("attention_backward", torch::CppFunction::makeFallthrough());
}

std::tuple<at::Tensor, at::Tensor> call_forward(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v
) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("hypershard::attention_forward", "")
                             .typed<decltype(forward_cpu)>();
  return op.call(q, k, v);
}

ThreeTensors call_backward(
    const at::Tensor& grad_out,
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const at::Tensor& out,
    const at::Tensor& log_sum_exp
) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("hypershard::attention_backward", "")
                             .typed<decltype(backward_cpu)>();
  return op.call(grad_out, q, k, v, out, log_sum_exp);
}

struct AttentionFunction : torch::autograd::Function<AttentionFunction> {
  static at::Tensor forward(
      AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v
  ) {
    auto [out, log_sum_exp] = call_forward(q, k, v);
    ctx->save_for_backward({q, k, v, out, log_sum_exp});
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    HS_SUPPORTED(
        !at::GradMode::is_enabled(),
        "nn.attention: there is no second derivative (backward with create_graph=true), as in "
        "ATen's fused attention",
        HS_HINT("compose the attention from matmul and softmax for that")
    );
    const auto saved = ctx->get_saved_variables();
    auto [grad_q, grad_k, grad_v] =
        call_backward(grads[0], saved[0], saved[1], saved[2], saved[3], saved[4]);
    return {grad_q, grad_k, grad_v};
  }
};

}  // namespace

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  HS_CHECK(
      q.dim() == 4 && k.dim() == 4 && v.sizes() == k.sizes() && q.size(0) == k.size(0) &&
          q.size(1) == k.size(1) && q.size(3) == k.size(3) && k.size(2) > 0 &&
          q.size(2) % k.size(2) == 0,
      "nn.attention: shapes do not fit: q ",
      q.sizes(),
      ", k ",
      k.sizes(),
      ", v ",
      v.sizes(),
      " (expected [batch, positions, heads, head_dim], heads of q a multiple of those of k and v)"
  );
  if (!fits_kernel(q, k, v)) {
    return attention_of_aten(q, k, v);
  }
  if (!at::GradMode::is_enabled()) {
    return std::get<0>(call_forward(q, k, v));
  }
  return AttentionFunction::apply(q, k, v);
}

}  // namespace hypershard::nn
