// Embedding: the operator hypershard::embedding_add_, the autograd function and the layer.
#include "hypershard/nn/embedding.h"

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "hypershard/core/error.h"
#include "hypershard/nn/gradient_slot.h"
#include "hypershard/nn/internal/cpu_kernels.h"
#include "hypershard/nn/internal/kernel_call.h"

namespace hypershard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Adds row i of `grad` to row indices[i] of `table`. Any device and dtype; the oracle of the CPU
// kernel.
void add_composite(at::Tensor table, const at::Tensor& indices, const at::Tensor& grad) {
  table.index_add_(0, indices, grad.to(table.scalar_type()));
}

bool fits_kernel(const at::Tensor& table, const at::Tensor& grad) {
  return internal::is_kernel_dtype(table.scalar_type()) &&
         internal::is_kernel_dtype(grad.scalar_type()) && table.is_contiguous();
}

// Threads share the columns, not the rows, so that equal indices meet in their order whatever the
// number of threads.
void add_cpu(at::Tensor table, const at::Tensor& indices_in, const at::Tensor& grad_in) {
  if (!fits_kernel(table, grad_in)) {
    return add_composite(table, indices_in, grad_in);
  }
  const auto indices = indices_in.contiguous();
  const auto grad = grad_in.contiguous();
  const std::int64_t dim = table.size(1);
  const std::int64_t count = indices.numel();
  const auto* row_of = internal::data_of<std::int64_t>(indices);
  internal::with_element_type(table.scalar_type(), [&](auto table_element) {
    internal::with_element_type(grad.scalar_type(), [&](auto grad_element) {
      auto* to = internal::mutable_data_of<decltype(table_element)>(table);
      const auto* from = internal::data_of<decltype(grad_element)>(grad);
      internal::for_rows(dim, count, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = 0; i < count; ++i) {
          internal::add_to(to + row_of[i] * dim + begin, from + i * dim + begin, end - begin);
        }
      });
    });
  });
}

TORCH_LIBRARY_FRAGMENT(hypershard, m) {
  m.def("embedding_add_(Tensor(a!) table, Tensor indices, Tensor grad) -> ()");
}
TORCH_LIBRARY_IMPL(hypershard, CPU, m) {
  m.impl("embedding_add_", add_cpu);
}
TORCH_LIBRARY_IMPL(hypershard, CompositeExplicitAutograd, m) {
  m.impl("embedding_add_", add_composite);
}
TORCH_LIBRARY_IMPL(hypershard, Autograd, m) {
  m.impl("embedding_add_", torch::CppFunction::makeFallthrough());
}

void call_add(const at::Tensor& table, const at::Tensor& indices, const at::Tensor& grad) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("hypershard::embedding_add_", "")
                             .typed<decltype(add_composite)>();
  op.call(table, indices, grad);
}

at::Tensor weight_gradient(
    const at::Tensor& weight, const at::Tensor& indices, const at::Tensor& grad_y
) {
  const auto claim = internal::claim_slot(weight);
  if (at::GradMode::is_enabled()) {
    return at::embedding_dense_backward(
        grad_y, indices, weight.size(0), /*padding_idx=*/-1, /*scale_grad=*/false
    );
  }
  const bool has_slot = claim.destination.defined();
  const auto table = has_slot ? claim.destination : at::zeros(weight.sizes(), weight.options());
  if (has_slot && claim.overwrite) {
    table.zero_();
  }
  call_add(table, indices.reshape({-1}), grad_y.reshape({-1, weight.size(1)}));
  return has_slot ? at::Tensor() : table;
}

struct EmbeddingFunction : torch::autograd::Function<EmbeddingFunction> {
  static at::Tensor forward(
      AutogradContext* ctx, const at::Tensor& weight, const at::Tensor& indices
  ) {
    ctx->save_for_backward({weight, indices});
    return at::embedding(weight, indices);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    return {weight_gradient(saved[0], saved[1], grads[0]), at::Tensor()};
  }
};

// at::embedding says only that some index is out of range.
void check_indices(const at::Tensor& indices_in, std::int64_t rows) {
  if (!indices_in.device().is_cpu()) {
    return;
  }
  const auto indices = indices_in.contiguous();
  const auto* data = internal::data_of<std::int64_t>(indices);
  for (std::int64_t i = 0; i < indices.numel(); ++i) {
    HS_CHECK(
        data[i] >= 0 && data[i] < rows,
        "nn.embedding: index ",
        data[i],
        " at position ",
        i,
        " of indices of shape ",
        indices.sizes(),
        " lies outside the table (expected 0 to ",
        rows - 1,
        ")",
        HS_HINT("is the model's vocabulary as large as the tokenizer's?")
    );
  }
}

}  // namespace

at::Tensor embedding(const at::Tensor& weight, const at::Tensor& indices) {
  HS_CHECK(
      weight.dim() == 2, "nn.embedding: weight of shape ", weight.sizes(), " (expected [rows, dim])"
  );
  HS_CHECK(
      indices.scalar_type() == at::kLong,
      "nn.embedding: indices of dtype ",
      indices.scalar_type(),
      " (expected Long)"
  );
  check_indices(indices, weight.size(0));
  if (!at::GradMode::is_enabled()) {
    return at::embedding(weight, indices);
  }
  return EmbeddingFunction::apply(weight, indices);
}

EmbeddingImpl::EmbeddingImpl(const EmbeddingOptions& options_in) : options(options_in) {
  reset();
}

void EmbeddingImpl::reset() {
  HS_CHECK(
      options.rows > 0 && options.dim > 0,
      "nn.embedding: rows and dim must be positive (got rows ",
      options.rows,
      ", dim ",
      options.dim,
      ")"
  );
  weight = register_parameter(
      "weight",
      at::empty(
          {options.rows, options.dim},
          at::TensorOptions().device(options.device).dtype(options.dtype)
      )
  );
  if (options.initialize && !weight.is_meta()) {
    const at::NoGradGuard no_grad;
    weight.normal_();
  }
}

}  // namespace hypershard::nn
