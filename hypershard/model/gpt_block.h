// One block of the GPT: attention and feed-forward, each a branch behind its norm.
// A block is what is normally sharded, and recomputed, as one unit.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <torch/nn/pimpl.h>

#include "hypershard/model/gpt_config.h"
#include "hypershard/nn/hooks.h"
#include "hypershard/nn/linear.h"
#include "hypershard/nn/rms_norm.h"
#include "hypershard/nn/rotary.h"

namespace hypershard::model {

/// Keys and values of the positions that one layer has seen: [batch, max_sequence, kv_heads,
/// head_dim] each, undefined before the first. Under a sharding plan kv_heads are this rank's.
struct LayerCache {
  at::Tensor keys;
  at::Tensor values;
};

/// What a block needs besides its input.
struct BlockContext {
  nn::RotaryTable rotary;             ///< a row for each position of the input
  LayerCache* cache = nullptr;        ///< with one, keys and values are kept there
  std::int64_t cached_positions = 0;  ///< positions already in the cache
};

/// Causal grouped-query attention with rotary positions: wq, wk, wv, wo.
///
/// Shapes: x [batch, positions, dim]; result likewise.
class AttentionImpl
    : public nn::Hookable<AttentionImpl, at::Tensor(const at::Tensor&, const BlockContext&)> {
 public:
  AttentionImpl(const GptConfig& config, const at::TensorOptions& options);
  void reset() override;
  at::Tensor forward_impl(const at::Tensor& x, const BlockContext& context);

  nn::Linear wq{nullptr}, wk{nullptr}, wv{nullptr}, wo{nullptr};

 private:
  GptConfig config_;
  at::TensorOptions options_;
};
TORCH_MODULE(Attention);

/// SwiGLU feed-forward: w2(silu(w1 x) * w3 x).
class MlpImpl : public nn::Hookable<MlpImpl, at::Tensor(const at::Tensor&)> {
 public:
  MlpImpl(const GptConfig& config, const at::TensorOptions& options);
  void reset() override;
  at::Tensor forward_impl(const at::Tensor& x);

  nn::Linear w1{nullptr}, w3{nullptr}, w2{nullptr};

 private:
  GptConfig config_;
  at::TensorOptions options_;
};
TORCH_MODULE(Mlp);

/// x + attn(attn_norm(x)), then x + mlp(mlp_norm(x)).
class BlockImpl
    : public nn::Hookable<BlockImpl, at::Tensor(const at::Tensor&, const BlockContext&)> {
 public:
  BlockImpl(const GptConfig& config, const at::TensorOptions& options);
  void reset() override;
  at::Tensor forward_impl(const at::Tensor& x, const BlockContext& context);

  nn::RmsNorm attn_norm{nullptr};
  Attention attn{nullptr};
  nn::RmsNorm mlp_norm{nullptr};
  Mlp mlp{nullptr};

 private:
  at::Tensor add_branch(const at::Tensor& x, const at::Tensor& branch) const;

  GptConfig config_;
  at::TensorOptions options_;
};
TORCH_MODULE(Block);

/// Makes a projection without bias whose memory is left for gpt_init() to fill.
nn::Linear make_projection(std::int64_t in, std::int64_t out, const at::TensorOptions& options);

}  // namespace hypershard::model
