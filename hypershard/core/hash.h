// Why: names become random streams and collectives become signatures through one stable hash.
// Stable means: the same on every machine, build and version, so it may be written to files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace hypershard {

/// The hash of nothing: where a running hash starts.
inline constexpr std::uint64_t kHashSeed = 0xcbf29ce484222325ULL;

/// Hashes bytes; pass an earlier result as `seed` to go on with more bytes.
///
/// Source: FNV-1a with 64 bits; Fowler, Noll, Vo (1991). Fine against accidents, not against
/// adversaries.
constexpr std::uint64_t hash_bytes(std::string_view bytes, std::uint64_t seed = kHashSeed) {
  std::uint64_t hash = seed;
  for (const char byte : bytes) {
    hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3ULL;
  }
  return hash;
}

/// Hashes raw memory. Not an overload: a literal would prefer `const void*` and its hash become a
/// size.
inline std::uint64_t hash_memory(
    const void* data, std::size_t num_bytes, std::uint64_t seed = kHashSeed
) {
  return hash_bytes(std::string_view(static_cast<const char*>(data), num_bytes), seed);
}

/// Adds an integer to a running hash, low byte first on every machine.
constexpr std::uint64_t hash_combine(std::uint64_t hash, std::uint64_t value) {
  for (int shift = 0; shift < 64; shift += 8) {
    hash = (hash ^ ((value >> shift) & 0xff)) * 0x100000001b3ULL;
  }
  return hash;
}

/// Names a random stream, e.g. by purpose and parameter.
constexpr std::uint64_t stream_of(std::string_view name) {
  return hash_bytes(name);
}

}  // namespace hypershard
