// Why: the writer and the reader of token files agree on the bytes in one place.
// All numbers are little-endian; the layout is documented where it is declared.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "hypershard/data/internal/sha256.h"

namespace hypershard::data::internal {

static_assert(std::endian::native == std::endian::little, "token files are little-endian");

inline constexpr std::array<char, 8> kTokenMagic{'H', 'S', 'T', 'O', 'K', 'E', 'N', 'S'};
inline constexpr std::uint32_t kTokenVersion = 1;

/// The first 128 bytes of a token file. Tokens follow at `tokens_offset`, then, at `table_offset`,
/// the table: tokenizer name (u32 length, bytes), separator id (i64, -1: none), and per document
/// begin, end, text bytes (u64 each) and name (u32 length, bytes).
struct TokenHeader {
  std::array<char, 8> magic = kTokenMagic;
  std::uint32_t version = kTokenVersion;
  std::uint32_t token_bytes = 0;  ///< 1, 2 or 4: unsigned integers
  std::uint64_t num_tokens = 0;
  std::uint64_t vocab_size = 0;
  std::uint64_t tokens_offset = 0;
  std::uint64_t table_offset = 0;
  std::uint64_t table_bytes = 0;
  std::uint64_t table_checksum = 0;  ///< first word of the table's SHA-256
  Digest tokens_sha256{};
  std::uint64_t num_documents = 0;
  std::array<std::uint8_t, 16> reserved{};  ///< zero
  std::uint64_t header_checksum = 0;        ///< first word of the SHA-256 of all bytes before it
};
static_assert(sizeof(TokenHeader) == 128);
static_assert(offsetof(TokenHeader, header_checksum) == 120);

/// Computes what `header_checksum` must be.
inline std::uint64_t checksum_of(const TokenHeader& header) {
  return first_word(sha256(&header, offsetof(TokenHeader, header_checksum)));
}

}  // namespace hypershard::data::internal
