// The GPT that trainer, examples, benchmarks and tests use: LLaMA's architecture on this library's
// layers.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/pimpl.h>

#include "hypershard/model/gpt_block.h"
#include "hypershard/model/gpt_config.h"
#include "hypershard/nn/embedding.h"
#include "hypershard/nn/hooks.h"
#include "hypershard/nn/linear.h"
#include "hypershard/nn/rms_norm.h"
#include "hypershard/nn/rotary.h"
#include "hypershard/nn/row_part.h"

namespace hypershard::model {

/// Where a GPT is built and how it starts.
struct GptOptions {
  at::Device device = at::kCPU;  ///< `at::kMeta`: no memory, no values
  at::ScalarType dtype = at::kFloat;
  std::optional<std::uint64_t> seed =
      0;  ///< of gpt_init(); nullopt leaves the matrices uninitialised
};

/// Keys and values of a sequence that grows, for sampling. Empty: the next forward starts a
/// sequence.
struct GptCache {
  std::vector<LayerCache> layers;
  std::int64_t length = 0;
};

/// Decoder-only transformer.
///
/// Parameters: embed.weight, blocks.I.{attn_norm, attn.{wq, wk, wv, wo}, mlp_norm, mlp.{w1 (gate),
/// w3 (up), w2 (down)}}.weight, norm.weight, head.weight (none if tied), in this order; matrices
/// [out, in]. Every module takes forward hooks, the root's see tokens and targets, and logits or
/// loss.
///
/// forward(tokens, targets, cache):
/// Shapes: tokens [batch, positions] int64. Without targets the result is logits [batch, positions,
/// vocab_size]; with targets
///         [batch, positions] the scalar mean cross entropy (fp32, or fp64 for fp64; negative
///         targets are left out). With a cache, logits of the last position only, [batch, 1,
///         vocab_size], and the cache grows.
/// Under a sharding plan (gpt_plan.h) each rank runs the same code on its heads, hidden units and
/// rows of the vocabulary; logits are those of vocabulary_part() then, and the loss is the whole's.
/// Errors: InvalidArgument if positions exceed max_sequence or a token the vocabulary.
class GptImpl
    : public nn::
          Hookable<GptImpl, at::Tensor(const at::Tensor&, std::optional<at::Tensor>, GptCache*)> {
 public:
  explicit GptImpl(const GptConfig& config, const GptOptions& options = {});

  /// The two common calls of forward.
  at::Tensor logits(const at::Tensor& tokens) { return forward(tokens, std::nullopt, nullptr); }
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets) {
    return forward(tokens, targets, nullptr);
  }

  void reset() override;
  at::Tensor forward_impl(
      const at::Tensor& tokens, const std::optional<at::Tensor>& targets, GptCache* cache
  );

  const GptConfig& config() const { return config_; }
  /// Returns which of the vocabulary's logits this rank computes, null for all.
  nn::RowPartPtr vocabulary_part() const;

  nn::Embedding embed{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  nn::RmsNorm norm{nullptr};
  nn::Linear head{nullptr};  ///< empty if tied

 private:
  at::Tensor run_block(BlockImpl& block, const at::Tensor& x, const BlockContext& context);
  const nn::RotaryTable& rotary_table(at::ScalarType dtype, at::Device device);

  GptConfig config_;
  GptOptions options_;
  nn::RotaryTable rotary_;  // made at the first forward: it is no parameter, and must not live on
                            // the meta device
};
TORCH_MODULE(Gpt);

}  // namespace hypershard::model
