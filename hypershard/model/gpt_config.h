// The shape of a GPT and what follows from it alone: parameter counts, FLOPs, first values.
// Apart from the model, so that planners and reports need no libtorch module.
#pragma once

#include <cstdint>
#include <string>

#include "hypershard/nn/init.h"

namespace hypershard::model {

/// What is forgotten in forward and computed again in backward.
enum class RecomputePolicy { kNone, kBlock };

/// A LLaMA-style decoder: pre-norm, RMSNorm, rotary positions, grouped-query attention, SwiGLU, no
/// biases.
struct GptConfig {
  std::int64_t vocab_size = 256;
  std::int64_t num_layers = 4;
  std::int64_t dim = 256;
  std::int64_t num_heads = 4;
  std::int64_t num_kv_heads = 0;  ///< 0: as num_heads
  std::int64_t hidden_dim = 0;  ///< of the feed-forward layer; 0: 8/3 dim, rounded up to a multiple
  std::int64_t hidden_multiple = 64;
  std::int64_t max_sequence = 256;
  double rope_theta = 10000;
  double norm_eps = 1e-5;
  bool tie_embeddings = false;  ///< the head uses embed.weight
  RecomputePolicy recompute = RecomputePolicy::kNone;
  double dropout = 0;  ///< on the embedding and on both branches of a block, in training mode
  double init_std = 0.02;

  std::int64_t head_dim() const { return dim / num_heads; }
};

/// Returns the configuration with its zeros filled in.
///
/// Errors: InvalidArgument naming the field, its value and what is allowed.
GptConfig checked(const GptConfig& config);

/// Returns the number of parameters; a tied head counts once.
std::int64_t num_parameters(const GptConfig& config);

/// Returns the floating point operations that training needs for one token of a sequence: 6 N + 12
/// L d S.
///
/// N counts the parameters of all matrix products (all but the embedding table, unless it is also
/// the head, and the norms), L layers, d = num_heads * head_dim, S = `sequence`. Attention is
/// counted without the causal half, and recomputed activations are not counted, as is the custom
/// for MFU. Source: Chowdhery et al. 2022, arXiv 2204.02311, appendix B.
double flops_per_token(const GptConfig& config, std::int64_t sequence);

/// Returns how parameters start: normal with `init_std`, branches' last matrices (wo, w2) divided
/// by sqrt(2 L), norms 1.
///
/// Source: Radford et al. 2019 (GPT-2), section 2.3.
nn::InitFn gpt_init(const GptConfig& config);

}  // namespace hypershard::model
