// Embedding: the operators hypershard::embedding_forward and embedding_add_, the autograd function
// and the layer.
// Both operators take the number of the table's first row. It is none for a whole table, of which
// every index must be a row; of a part, the rows of other ranks count as zeros.
#include "hypershard/nn/embedding.h"

#include <cstdint>
#include <cstring>
#include <optional>

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
#include "hypershard/nn/internal/layer_rules.h"
#include "hypershard/nn/row_part.h"

namespace hypershard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using FirstRow = std::optional<std::int64_t>;

/// Rows of a part by global numbers, as they lie: numbers within the part, and which ones are.
struct LocalRows {
  at::Tensor rows;    // clamped into the part
  at::Tensor inside;  // bool
};

LocalRows local_rows(const at::Tensor& indices, std::int64_t first_row, std::int64_t count) {
  const auto local = indices - first_row;
  return {local.clamp(0, count - 1), local.ge(0).logical_and(local.lt(count))};
}

// Any device and dtype; the oracles of the CPU kernels.
at::Tensor forward_composite(
    const at::Tensor& weight, const at::Tensor& indices, FirstRow first_row
) {
  if (!first_row.has_value()) {
    return at::embedding(weight, indices);
  }
  if (weight.size(0) == 0) {
    auto shape = indices.sizes().vec();
    shape.push_back(weight.size(1));
    return at::zeros(shape, weight.options());
  }
  const auto local = local_rows(indices, *first_row, weight.size(0));
  return at::embedding(weight, local.rows).masked_fill(local.inside.logical_not().unsqueeze(-1), 0);
}

// Adds row i of `grad` to row indices[i] of `table`.
void add_composite(
    at::Tensor table, const at::Tensor& indices, const at::Tensor& grad, FirstRow first_row
) {
  if (table.size(0) == 0) {
    return;
  }
  if (!first_row.has_value()) {
    table.index_add_(0, indices, grad.to(table.scalar_type()));
    return;
  }
  const auto local = local_rows(indices, *first_row, table.size(0));
  table.index_add_(
      0,
      local.rows,
      grad.masked_fill(local.inside.logical_not().unsqueeze(-1), 0).to(table.scalar_type())
  );
}

// Meta: libtorch's own embedding has no kernel there.
at::Tensor forward_meta(const at::Tensor& weight, const at::Tensor& indices, FirstRow) {
  auto shape = indices.sizes().vec();
  shape.push_back(weight.size(1));
  return at::empty(shape, weight.options());
}

bool fits_kernel(const at::Tensor& table, const at::Tensor& grad) {
  return internal::is_kernel_dtype(table.scalar_type()) &&
         internal::is_kernel_dtype(grad.scalar_type()) && table.is_contiguous();
}

at::Tensor forward_cpu(
    const at::Tensor& weight_in, const at::Tensor& indices_in, FirstRow first_row
) {
  const auto weight = weight_in.contiguous();
  const auto indices = indices_in.contiguous();
  auto shape = indices.sizes().vec();
  shape.push_back(weight.size(1));
  const auto result = at::empty(shape, weight.options());
  const std::int64_t first = first_row.value_or(0);
  const std::int64_t rows = weight.size(0);
  const auto row_bytes = static_cast<std::size_t>(weight.size(1)) * weight.element_size();
  const auto* row_of = internal::data_of<std::int64_t>(indices);
  const auto* from = internal::data_of<char>(weight);
  auto* to = internal::mutable_data_of<char>(result);
  internal::for_rows(indices.numel(), weight.size(1), [&](std::int64_t begin, std::int64_t end) {
    for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
      const std::int64_t row = row_of[i] - first;
      if (row >= 0 && row < rows) {
        std::memcpy(
            to + i * row_bytes, from + static_cast<std::size_t>(row) * row_bytes, row_bytes
        );
      } else {
        std::memset(to + i * row_bytes, 0, row_bytes);
      }
    }
  });
  return result;
}

// Threads share the columns, not the rows, so that equal indices meet in their order whatever the
// number of threads.
void add_cpu(
    at::Tensor table, const at::Tensor& indices_in, const at::Tensor& grad_in, FirstRow first_row
) {
  if (!fits_kernel(table, grad_in)) {
    return add_composite(table, indices_in, grad_in, first_row);
  }
  const auto indices = indices_in.contiguous();
  const auto grad = grad_in.contiguous();
  const std::int64_t dim = table.size(1);
  const std::int64_t rows = table.size(0);
  const std::int64_t count = indices.numel();
  const std::int64_t first = first_row.value_or(0);
  const auto* row_of = internal::data_of<std::int64_t>(indices);
  internal::with_element_type(table.scalar_type(), [&](auto table_element) {
    internal::with_element_type(grad.scalar_type(), [&](auto grad_element) {
      auto* to = internal::mutable_data_of<decltype(table_element)>(table);
      const auto* from = internal::data_of<decltype(grad_element)>(grad);
      internal::for_rows(dim, count, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = 0; i < count; ++i) {
          const std::int64_t row = row_of[i] - first;
          if (row >= 0 && row < rows) {
            internal::add_to(to + row * dim + begin, from + i * dim + begin, end - begin);
          }
        }
      });
    });
  });
}

TORCH_LIBRARY_FRAGMENT(hypershard, m) {
  dtensor::register_op_rule("hypershard::embedding_forward", internal::embedding_forward_rule);
  m.def("embedding_forward(Tensor weight, Tensor indices, int? first_row) -> Tensor");
  m.def("embedding_add_(Tensor(a!) table, Tensor indices, Tensor grad, int? first_row) -> ()");
}
TORCH_LIBRARY_IMPL(hypershard, CPU, m) {
  m.impl("embedding_forward", forward_cpu);
  m.impl("embedding_add_", add_cpu);
}
TORCH_LIBRARY_IMPL(hypershard, Meta, m) {
  m.impl("embedding_forward", forward_meta);
}
TORCH_LIBRARY_IMPL(hypershard, CompositeExplicitAutograd, m) {
  m.impl("embedding_forward", forward_composite);
  m.impl("embedding_add_", add_composite);
}
TORCH_LIBRARY_IMPL(hypershard, Autograd, m) {
  m.impl("embedding_forward", torch::CppFunction::makeFallthrough());
  m.impl("embedding_add_", torch::CppFunction::makeFallthrough());
}

at::Tensor call_forward(const at::Tensor& weight, const at::Tensor& indices, FirstRow first_row) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("hypershard::embedding_forward", "")
                             .typed<decltype(forward_composite)>();
  return op.call(weight, indices, first_row);
}

void call_add(
    const at::Tensor& table, const at::Tensor& indices, const at::Tensor& grad, FirstRow first_row
) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("hypershard::embedding_add_", "")
                             .typed<decltype(add_composite)>();
  op.call(table, indices, grad, first_row);
}

// The gradient as something that can be differentiated again: rows of other ranks meet in one row
// behind the last, which is left out.
at::Tensor differentiable_weight_gradient(
    const at::Tensor& weight,
    const at::Tensor& indices,
    const at::Tensor& grad_y,
    FirstRow first_row
) {
  const std::int64_t rows = weight.size(0);
  auto row_of = indices;
  if (first_row.has_value()) {
    const auto local = local_rows(indices, *first_row, rows);
    row_of = local.rows.masked_fill(local.inside.logical_not(), rows);
  }
  return at::embedding_dense_backward(
             grad_y, row_of, rows + 1, /*padding_idx=*/-1, /*scale_grad=*/false
  )
      .narrow(0, 0, rows);
}

at::Tensor weight_gradient(
    const at::Tensor& weight,
    const at::Tensor& indices,
    const at::Tensor& grad_y,
    FirstRow first_row
) {
  const auto claim = internal::claim_slot(weight);
  if (at::GradMode::is_enabled()) {
    return differentiable_weight_gradient(weight, indices, grad_y, first_row);
  }
  const bool has_slot = claim.destination.defined();
  const auto table = has_slot ? claim.destination : at::zeros(weight.sizes(), weight.options());
  if (has_slot && claim.overwrite) {
    table.zero_();
  }
  call_add(table, indices.reshape({-1}), grad_y.reshape({-1, weight.size(1)}), first_row);
  return has_slot ? at::Tensor() : table;
}

struct EmbeddingFunction : torch::autograd::Function<EmbeddingFunction> {
  static at::Tensor forward(
      AutogradContext* ctx, const at::Tensor& weight, const at::Tensor& indices, FirstRow first_row
  ) {
    ctx->save_for_backward({weight, indices});
    ctx->saved_data["first_row"] = first_row;
    return call_forward(weight, indices, first_row);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto first_row = ctx->saved_data.at("first_row").toOptional<std::int64_t>();
    return {weight_gradient(saved[0], saved[1], grads[0], first_row), at::Tensor(), at::Tensor()};
  }
};

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
  const auto part = row_part_of(weight);
  check_indices(indices, part == nullptr ? weight.size(0) : part->total);
  const FirstRow first_row = part == nullptr ? FirstRow() : FirstRow(part->first);
  if (!at::GradMode::is_enabled()) {
    return call_forward(weight, indices, first_row);
  }
  return EmbeddingFunction::apply(weight, indices, first_row);
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
