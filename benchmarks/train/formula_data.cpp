// See formula_data.h.
#include "benchmarks/train/formula_data.h"

#include <ATen/ops/empty.h>

#include "hypershard/core/hash.h"

namespace hypershard::bench {
namespace {

constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15ULL;

std::uint64_t stream_key(std::string_view name, std::uint64_t seed) {
  return hash_bytes(name) ^ (seed * kGolden);
}

std::uint64_t splitmix(std::uint64_t key, std::uint64_t index) {
  std::uint64_t z = key + (index + 1) * kGolden;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

}  // namespace

at::Tensor formula_weights(std::string_view name, std::uint64_t seed, std::int64_t numel) {
  constexpr float kScale = 1.0F / (1 << 28);
  const std::uint64_t key = stream_key(name, seed);
  at::Tensor values = at::empty({numel}, at::kFloat);
  float* out = values.mutable_data_ptr<float>();
  for (std::int64_t i = 0; i < numel; ++i) {
    const auto top = static_cast<std::int64_t>(splitmix(key, static_cast<std::uint64_t>(i)) >> 40);
    out[i] = static_cast<float>(top - (1 << 23)) * kScale;
  }
  return values;
}

at::Tensor formula_tokens(
    std::uint64_t seed,
    std::int64_t step,
    std::int64_t first,
    std::int64_t rows,
    std::int64_t sequence,
    std::int64_t vocab
) {
  const std::uint64_t key = stream_key("tokens", seed);
  at::Tensor tokens = at::empty({rows, sequence + 1}, at::kLong);
  auto* out = tokens.mutable_data_ptr<std::int64_t>();
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto index = static_cast<std::uint64_t>(step * (1 << 20) + first + row);
    auto x = static_cast<std::int64_t>(splitmix(key, index) % static_cast<std::uint64_t>(vocab));
    for (std::int64_t t = 0; t <= sequence; ++t) {
      *out++ = x;
      x = (5 * x + 17) % vocab;
    }
  }
  return tokens;
}

}  // namespace hypershard::bench
