// Generates tokens from a GPT, one after the other.
// Deterministic: same weights, prompt and seed give the same tokens, on every rank.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace hypershard::model {

class GptImpl;

/// How tokens are picked and how many.
struct SampleOptions {
  std::int64_t max_new_tokens = 500;
  double temperature = 0.8;  ///< 0: always the likeliest token
  std::int64_t top_k = 0;    ///< keep only the k likeliest tokens; 0: all
  double top_p = 1.0;        ///< keep the likeliest tokens that together have this probability
  std::uint64_t seed = 0;
  /// Told each token as it is made; returning false ends the generation.
  std::function<bool(std::int64_t token)> on_token = {};
};

/// Returns the tokens that follow `prompt`.
///
/// Runs in evaluation mode without gradients (the model's mode is put back), with a cache of keys
/// and values. When the context is full, generation goes on from its later half. If the model is
/// sharded, all ranks must call it together. Errors: InvalidArgument if the prompt is empty or an
/// option is out of range.
std::vector<std::int64_t> generate(
    GptImpl& model, const std::vector<std::int64_t>& prompt, const SampleOptions& options = {}
);

/// Returns the token that `u` in [0, 1) picks from the distribution that logits and options define.
///
/// Order of the steps: temperature, top_k, top_p, each on what the one before left. Equal logits
/// rank by token. Source: top_p is nucleus sampling, Holtzman et al. 2019, arXiv 1904.09751.
std::int64_t pick_token(std::span<const float> logits, const SampleOptions& options, double u);

}  // namespace hypershard::model
