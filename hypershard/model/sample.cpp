// Sampling with a cache of keys and values.
#include "hypershard/model/sample.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include "hypershard/core/error.h"
#include "hypershard/core/random.h"
#include "hypershard/model/evaluation_scope.h"
#include "hypershard/model/gpt.h"
#include "hypershard/nn/row_part.h"

namespace hypershard::model {
namespace {

struct Candidate {
  std::int64_t token;
  double weight;
};

void check_options(const SampleOptions& options) {
  HS_CHECK(
      options.temperature >= 0,
      "model.sample: temperature must not be negative (got ",
      options.temperature,
      ")"
  );
  HS_CHECK(
      options.top_k >= 0, "model.sample: top_k must not be negative (got ", options.top_k, ")"
  );
  HS_CHECK(
      options.top_p > 0 && options.top_p <= 1,
      "model.sample: top_p must be in (0, 1] (got ",
      options.top_p,
      ")"
  );
  HS_CHECK(
      options.max_new_tokens >= 0,
      "model.sample: max_new_tokens must not be negative (got ",
      options.max_new_tokens,
      ")"
  );
}

/// Tokens from the likeliest down, with unnormalised probabilities.
std::vector<Candidate> ranked_candidates(std::span<const float> logits, double temperature) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  std::vector<Candidate> candidates(logits.size());
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double weight = std::exp((static_cast<double>(logits[i]) - largest) / temperature);
    candidates[i] = {static_cast<std::int64_t>(i), weight};
  }
  std::stable_sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) {
    return a.weight > b.weight;
  });
  return candidates;
}

double total_weight(const std::vector<Candidate>& candidates) {
  return std::accumulate(
      candidates.begin(),
      candidates.end(),
      0.0,
      [](double sum, const auto& candidate) { return sum + candidate.weight; }
  );
}

/// Keeps the shortest head of the ranking that has at least the share `top_p`.
void cut_to_nucleus(std::vector<Candidate>& candidates, double top_p) {
  const double wanted = top_p * total_weight(candidates);
  double sum = 0;
  std::size_t kept = 0;
  while (kept < candidates.size() && (kept == 0 || sum < wanted)) {
    sum += candidates[kept++].weight;
  }
  candidates.resize(kept);
}

/// Runs the model on tokens that follow the cache and returns the logits of the last one.
std::vector<float> last_logits(
    GptImpl& model, std::span<const std::int64_t> tokens, GptCache& cache
) {
  std::vector<std::int64_t> owned(tokens.begin(), tokens.end());
  const auto input = at::from_blob(
      owned.data(),
      {1, static_cast<std::int64_t>(owned.size())},
      at::TensorOptions().dtype(at::kLong)
  );
  const auto device = model.norm->weight.device();
  auto found = model.forward(input.to(device), std::nullopt, &cache);
  const auto part = model.vocabulary_part();
  if (part != nullptr && found.size(-1) != part->total) {
    found = nn::gather_columns(found, *part);
  }
  const auto logits = found.to(at::kCPU, at::kFloat).contiguous();
  const float* data = logits.const_data_ptr<float>();
  return {data, data + logits.numel()};
}

}  // namespace

std::int64_t pick_token(std::span<const float> logits, const SampleOptions& options, double u) {
  HS_CHECK(!logits.empty(), "model.sample: no logits to pick from");
  if (options.temperature == 0) {
    return std::max_element(logits.begin(), logits.end()) - logits.begin();
  }
  auto candidates = ranked_candidates(logits, options.temperature);
  if (options.top_k > 0 && static_cast<std::size_t>(options.top_k) < candidates.size()) {
    candidates.resize(static_cast<std::size_t>(options.top_k));
  }
  if (options.top_p < 1) {
    cut_to_nucleus(candidates, options.top_p);
  }
  double left = u * total_weight(candidates);
  for (const auto& candidate : candidates) {
    left -= candidate.weight;
    if (left < 0) {
      return candidate.token;
    }
  }
  return candidates.back().token;
}

std::vector<std::int64_t> generate(
    GptImpl& model, const std::vector<std::int64_t>& prompt, const SampleOptions& options
) {
  HS_CHECK(
      !prompt.empty(),
      "model.sample: the prompt is empty",
      HS_HINT("give at least one token, e.g. a line feed")
  );
  check_options(options);
  const EvaluationScope evaluation(model);
  const auto window = static_cast<std::size_t>(model.config().max_sequence);
  const std::uint64_t stream = stream_of("sample");

  std::vector<std::int64_t> tokens = prompt;
  GptCache cache;
  std::size_t fed =
      tokens.size() -
      std::min(tokens.size(), window);  // the first token that the cache does not hold
  for (std::int64_t step = 0; step < options.max_new_tokens; ++step) {
    if (static_cast<std::size_t>(cache.length) + (tokens.size() - fed) > window) {
      cache = {};
      fed = tokens.size() - std::max<std::size_t>(1, window / 2);
    }
    const auto logits = last_logits(model, std::span(tokens).subspan(fed), cache);
    fed = tokens.size();
    const double u = uniform_at(options.seed, stream, static_cast<std::uint64_t>(step));
    tokens.push_back(pick_token(logits, options, u));
    if (options.on_token && !options.on_token(tokens.back())) {
      break;
    }
  }
  return {tokens.begin() + static_cast<std::ptrdiff_t>(prompt.size()), tokens.end()};
}

}  // namespace hypershard::model
