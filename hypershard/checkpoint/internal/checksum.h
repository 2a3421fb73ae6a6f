// Why: a byte that flips on a disk must be noticed, at the speed of memory.
// XXH64, so that anyone can check a file with `xxhsum -H64`.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace hypershard::checkpoint::internal {

/// Digests bytes that arrive in pieces of any size.
/// Source: the specification of xxHash, XXH64 with seed 0. Fine against accidents, not adversaries.
class Checksum {
 public:
  /// Adds `size` bytes.
  void update(const void* data, std::size_t size);
  /// Returns the digest of all bytes so far.
  std::uint64_t value() const;

 private:
  std::array<std::uint64_t, 4> lanes_{
      0x60ea27eeadc0b5d6ULL, 0xc2b2ae3d27d4eb4fULL, 0, 0x61c8864e7a143579ULL
  };
  std::array<std::byte, 32> pending_{};
  std::size_t num_pending_ = 0;
  std::uint64_t num_bytes_ = 0;
};

/// Writes a digest as `xxh64:` and 16 hexadecimal digits.
std::string checksum_text(std::uint64_t checksum);
/// Digests one piece of memory.
std::uint64_t checksum_of(std::string_view bytes);

}  // namespace hypershard::checkpoint::internal
