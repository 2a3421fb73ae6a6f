// Construction and forward pass of the GPT.
#include "hypershard/model/gpt.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/ops/dropout.h>

#include "hypershard/core/error.h"
#include "hypershard/nn/cross_entropy.h"
#include "hypershard/nn/init.h"
#include "hypershard/nn/recompute.h"
#include "hypershard/plan/whole_dimension.h"

namespace hypershard::model {
namespace {

// Refuses a plan that cuts positions, on all ranks alike.
at::Tensor embed_whole(nn::Embedding& embed, const at::Tensor& tokens) {
  const plan::WholeDimensionScope positions(
      /*dim=*/1,
      "model.gpt's cache of keys and values",
      "sample under a plan without `sequence`; `hypershard sample` runs any checkpoint whole, in "
      "one process"
  );
  return embed->forward(tokens);
}

}  // namespace

GptImpl::GptImpl(const GptConfig& config, const GptOptions& options)
    : config_(checked(config)), options_(options) {
  reset();
  if (options_.seed.has_value() && !options_.device.is_meta()) {
    nn::initialize_module(*this, gpt_init(config_), *options_.seed);
  }
}

void GptImpl::reset() {
  const auto options = at::TensorOptions().device(options_.device).dtype(options_.dtype);
  embed = register_module(
      "embed",
      nn::Embedding(nn::EmbeddingOptions{
          .rows = config_.vocab_size,
          .dim = config_.dim,
          .device = options_.device,
          .dtype = options_.dtype,
          .initialize = false
      })
  );
  blocks = register_module("blocks", torch::nn::ModuleList());
  for (std::int64_t layer = 0; layer < config_.num_layers; ++layer) {
    blocks->push_back(Block(config_, options));
  }
  norm = register_module(
      "norm",
      nn::RmsNorm(nn::RmsNormOptions{
          .dim = config_.dim,
          .eps = config_.norm_eps,
          .device = options_.device,
          .dtype = options_.dtype
      })
  );
  if (!config_.tie_embeddings) {
    head = register_module("head", make_projection(config_.dim, config_.vocab_size, options));
  }
}

const nn::RotaryTable& GptImpl::rotary_table(at::ScalarType dtype, at::Device device) {
  const auto table_dtype = dtype == at::kDouble ? at::kDouble : at::kFloat;
  if (!rotary_.cosine.defined() || rotary_.cosine.scalar_type() != table_dtype ||
      rotary_.cosine.device() != device) {
    rotary_ = nn::make_rotary_table(
        config_.max_sequence, config_.head_dim(), config_.rope_theta, table_dtype, device
    );
  }
  return rotary_;
}

at::Tensor GptImpl::run_block(BlockImpl& block, const at::Tensor& x, const BlockContext& context) {
  if (config_.recompute == RecomputePolicy::kNone || context.cache != nullptr) {
    return block.forward(x, context);
  }
  const auto kept = std::static_pointer_cast<BlockImpl>(block.shared_from_this());
  return nn::recompute(
      [kept, context](const at::Tensor& input) { return kept->forward(input, context); }, x
  );
}

nn::RowPartPtr GptImpl::vocabulary_part() const {
  return nn::row_part_of(head.is_empty() ? embed->weight : head->weight);
}

at::Tensor GptImpl::forward_impl(
    const at::Tensor& tokens, const std::optional<at::Tensor>& targets, GptCache* cache
) {
  const std::int64_t begin = cache == nullptr ? 0 : cache->length;
  HS_CHECK(
      tokens.dim() == 2,
      "model.gpt: tokens of shape ",
      tokens.sizes(),
      " (expected [batch, positions])"
  );
  HS_CHECK(
      begin + tokens.size(1) <= config_.max_sequence,
      "model.gpt: ",
      begin + tokens.size(1),
      " positions (expected at most max_sequence, ",
      config_.max_sequence,
      ")"
  );
  auto x = cache == nullptr ? embed->forward(tokens) : embed_whole(embed, tokens);
  if (config_.dropout > 0) {
    x = at::dropout(x, config_.dropout, is_training());
  }
  if (cache != nullptr && begin == 0) {
    cache->layers.assign(blocks->size(), {});
  }
  BlockContext context{
      .rotary = rotary_table(x.scalar_type(), x.device()).narrow(begin, tokens.size(1)),
      .cached_positions = begin
  };
  for (std::size_t layer = 0; layer < blocks->size(); ++layer) {
    context.cache = cache == nullptr ? nullptr : &cache->layers[layer];
    x = run_block(blocks->at<BlockImpl>(layer), x, context);
  }
  if (cache != nullptr) {
    cache->length += tokens.size(1);
    x = x.narrow(1, x.size(1) - 1, 1);
  }
  x = norm->forward(x);
  const auto logits = head.is_empty() ? nn::linear(x, embed->weight) : head->forward(x);
  return targets.has_value() ? nn::cross_entropy(logits, *targets, vocabulary_part()) : logits;
}

}  // namespace hypershard::model
