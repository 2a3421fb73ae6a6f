// Why: manifests name contents in a form that `sha256sum` can check, and token files detect damage.
// One digest serves both; nothing else in the project needs a cryptographic library.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace hypershard::data::internal {

using Digest = std::array<std::uint8_t, 32>;

/// Digests bytes that arrive in pieces.
/// Source: FIPS 180-4, section 6.2; names follow the standard.
class Sha256 {
 public:
  /// Adds `size` bytes.
  void update(const void* data, std::size_t size);
  void update(std::string_view text) { update(text.data(), text.size()); }
  /// Pads and returns the digest; the object must not be used afterwards.
  Digest finish();

 private:
  void compress(const std::uint8_t* block);

  std::array<std::uint32_t, 8> hash_{
      0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19
  };
  std::array<std::uint8_t, 64> pending_{};
  std::size_t num_pending_ = 0;
  std::uint64_t num_bytes_ = 0;
};

/// Digests one piece of memory.
Digest sha256(const void* data, std::size_t size);
/// Digests one text and writes it as 64 hexadecimal digits.
std::string sha256_hex(std::string_view text);
/// Writes bytes as hexadecimal digits, two each.
std::string hex_of(std::string_view bytes);
/// Writes a digest as 64 hexadecimal digits.
std::string to_hex(const Digest& digest);
/// Returns the digest's first 8 bytes as a little-endian number, a checksum for short records.
std::uint64_t first_word(const Digest& digest);

}  // namespace hypershard::data::internal
