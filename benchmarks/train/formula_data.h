// Weights and tokens by formula, so that programs in other languages start from the same bits.
#pragma once

#include <cstdint>
#include <string_view>

#include <ATen/core/Tensor.h>

namespace hypershard::bench {

/// Returns `numel` fp32 values in [-1/32, 1/32): element i is (top 24 bits of hash i - 2^23) 2^-28,
/// exact in every step. The hash is splitmix64 over the FNV-1a of `name` and the seed.
/// Source: Steele, Lea, Flood, Fast splittable pseudorandom number generators (2014), figure 16.
at::Tensor formula_weights(std::string_view name, std::uint64_t seed, std::int64_t numel);

/// Returns rows [first, first + rows) of a step's global batch.
///
/// Row r starts at hash(s 2^20 + r) mod vocab and goes on as x -> (5 x + 17) mod vocab.
/// Shapes: int64 [rows, sequence + 1].
at::Tensor formula_tokens(
    std::uint64_t seed,
    std::int64_t step,
    std::int64_t first,
    std::int64_t rows,
    std::int64_t sequence,
    std::int64_t vocab
);

}  // namespace hypershard::bench
