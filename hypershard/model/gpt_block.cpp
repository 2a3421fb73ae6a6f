// Forward passes of a GPT block.
// Layout of activations: [batch, positions, heads, head_dim] in memory throughout, so that heads
// are views and no transposition is ever carried out. Sizes come from the tensors, not from the
// configuration: under a sharding plan a rank has some of the heads.
#include "hypershard/model/gpt_block.h"

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include "hypershard/core/error.h"
#include "hypershard/nn/attention.h"
#include "hypershard/nn/swiglu.h"

namespace hypershard::model {
namespace {

at::Tensor split_heads(const at::Tensor& x, std::int64_t head_dim) {
  return x.view({x.size(0), x.size(1), x.size(2) / head_dim, head_dim});
}

/// Writes new keys or values behind the cached ones and returns all of them. The first ones make
/// the cache.
at::Tensor extend_cache(
    at::Tensor& cache,
    const at::Tensor& fresh,
    std::int64_t cached_positions,
    std::int64_t max_positions
) {
  if (!cache.defined()) {
    cache =
        at::empty({fresh.size(0), max_positions, fresh.size(2), fresh.size(3)}, fresh.options());
  }
  const std::int64_t end = cached_positions + fresh.size(1);
  HS_CHECK_LE(end, cache.size(1), "model.gpt: the cache is full");
  cache.narrow(1, cached_positions, fresh.size(1)).copy_(fresh);
  return cache.narrow(1, 0, end);
}

/// One new position looks at all cached ones, so there is nothing to mask.
at::Tensor attend_to_all(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  HS_CHECK(
      q.size(1) == 1,
      "model.gpt: only one position at a time can follow cached ones (got ",
      q.size(1),
      ")"
  );
  const auto out = at::scaled_dot_product_attention(
      q.transpose(1, 2),
      k.transpose(1, 2),
      v.transpose(1, 2),
      /*attn_mask=*/{},
      /*dropout_p=*/0.0,
      /*is_causal=*/false,
      /*scale=*/std::nullopt,
      /*enable_gqa=*/q.size(2) != k.size(2)
  );
  return out.transpose(1, 2).contiguous();
}

nn::RmsNorm make_norm(const GptConfig& config, const at::TensorOptions& options) {
  return nn::RmsNorm(nn::RmsNormOptions{
      .dim = config.dim,
      .eps = config.norm_eps,
      .device = options.device(),
      .dtype = at::typeMetaToScalarType(options.dtype())
  });
}

}  // namespace

nn::Linear make_projection(std::int64_t in, std::int64_t out, const at::TensorOptions& options) {
  return nn::Linear(nn::LinearOptions{
      .in = in,
      .out = out,
      .device = options.device(),
      .dtype = at::typeMetaToScalarType(options.dtype()),
      .initialize = false
  });
}

AttentionImpl::AttentionImpl(const GptConfig& config, const at::TensorOptions& options)
    : config_(checked(config)), options_(options) {
  reset();
}

void AttentionImpl::reset() {
  const std::int64_t dim = config_.dim;
  const std::int64_t kv_dim = config_.num_kv_heads * config_.head_dim();
  wq = register_module("wq", make_projection(dim, dim, options_));
  wk = register_module("wk", make_projection(dim, kv_dim, options_));
  wv = register_module("wv", make_projection(dim, kv_dim, options_));
  wo = register_module("wo", make_projection(dim, dim, options_));
}

at::Tensor AttentionImpl::forward_impl(const at::Tensor& x, const BlockContext& context) {
  const std::int64_t head_dim = config_.head_dim();
  const auto q = nn::rotate(split_heads(wq->forward(x), head_dim), context.rotary);
  auto k = nn::rotate(split_heads(wk->forward(x), head_dim), context.rotary);
  auto v = split_heads(wv->forward(x), head_dim);
  if (context.cache != nullptr) {
    const std::int64_t most = config_.max_sequence;
    k = extend_cache(context.cache->keys, k, context.cached_positions, most);
    v = extend_cache(context.cache->values, v, context.cached_positions, most);
  }
  const auto heads =
      context.cached_positions == 0 ? nn::causal_attention(q, k, v) : attend_to_all(q, k, v);
  return wo->forward(heads.view({x.size(0), x.size(1), heads.size(2) * heads.size(3)}));
}

MlpImpl::MlpImpl(const GptConfig& config, const at::TensorOptions& options)
    : config_(checked(config)), options_(options) {
  reset();
}

void MlpImpl::reset() {
  w1 = register_module("w1", make_projection(config_.dim, config_.hidden_dim, options_));
  w3 = register_module("w3", make_projection(config_.dim, config_.hidden_dim, options_));
  w2 = register_module("w2", make_projection(config_.hidden_dim, config_.dim, options_));
}

at::Tensor MlpImpl::forward_impl(const at::Tensor& x) {
  return w2->forward(nn::swiglu(w1->forward(x), w3->forward(x)));
}

BlockImpl::BlockImpl(const GptConfig& config, const at::TensorOptions& options)
    : config_(checked(config)), options_(options) {
  reset();
}

void BlockImpl::reset() {
  attn_norm = register_module("attn_norm", make_norm(config_, options_));
  attn = register_module("attn", Attention(config_, options_));
  mlp_norm = register_module("mlp_norm", make_norm(config_, options_));
  mlp = register_module("mlp", Mlp(config_, options_));
}

at::Tensor BlockImpl::add_branch(const at::Tensor& x, const at::Tensor& branch) const {
  return x + (config_.dropout > 0 ? at::dropout(branch, config_.dropout, is_training()) : branch);
}

at::Tensor BlockImpl::forward_impl(const at::Tensor& x, const BlockContext& context) {
  const auto y = add_branch(x, attn->forward(attn_norm->forward(x), context));
  return add_branch(y, mlp->forward(mlp_norm->forward(y)));
}

}  // namespace hypershard::model
