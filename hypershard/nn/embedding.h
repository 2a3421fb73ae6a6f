// The embedding layer whose gradient rows are added straight into the engine's gradient buffer.
#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <torch/nn/pimpl.h>

#include "hypershard/nn/hooks.h"

namespace hypershard::nn {

/// Returns the rows of `weight` named by `indices`.
///
/// Where weight has a RowPart, indices are rows of the whole table, and those of other ranks give
/// zero rows: the sum over the part's ranks is the result.
/// Where weight has a GradientSlot, backward adds the rows there, in the slot's dtype and in the
/// order of the indices; the first use of an accumulation zeroes the slot before. No temporary of
/// the weight's size. Shapes: weight [rows, dim]; indices [...], int64; result [..., dim]. Errors:
/// InvalidArgument if an index lies outside the table (names its position); Unsupported under
/// create_graph if a slot
///         is attached.
at::Tensor embedding(const at::Tensor& weight, const at::Tensor& indices);

/// Size, place and start of an Embedding.
struct EmbeddingOptions {
  std::int64_t rows = 0;
  std::int64_t dim = 0;
  std::optional<at::Device> device = std::nullopt;
  std::optional<at::ScalarType> dtype = std::nullopt;
  bool initialize = true;  ///< false: leave the memory as it is, somebody else fills it
};

/// Layer with parameter `weight` [rows, dim], standard normal at the start from torch's default
/// generator (not at all on the meta device).
class EmbeddingImpl : public Hookable<EmbeddingImpl, at::Tensor(const at::Tensor&)> {
 public:
  explicit EmbeddingImpl(const EmbeddingOptions& options);
  EmbeddingImpl(std::int64_t rows, std::int64_t dim)
      : EmbeddingImpl(EmbeddingOptions{.rows = rows, .dim = dim}) {}

  void reset() override;
  at::Tensor forward_impl(const at::Tensor& indices) { return nn::embedding(weight, indices); }

  EmbeddingOptions options;
  at::Tensor weight;
};
TORCH_MODULE(Embedding);

}  // namespace hypershard::nn
