// The digests are those of the reference implementation (python package xxhash, seed 0).
#include "hypershard/checkpoint/internal/checksum.h"

#include <algorithm>
#include <string>

#include <gtest/gtest.h>

namespace hypershard::checkpoint::internal {
namespace {

std::string sequence(int count, int factor, int offset) {
  std::string bytes;
  for (int i = 0; i < count; ++i) {
    bytes.push_back(static_cast<char>((i * factor + offset) % 256));
  }
  return bytes;
}

TEST(ChecksumTest, EqualsTheReferenceForShortAndLongInput) {
  EXPECT_EQ(checksum_of(""), 0xef46db3751d8e999ULL);
  EXPECT_EQ(checksum_of("a"), 0xd24ec4f1a98c6e5bULL);
  EXPECT_EQ(checksum_of("abc"), 0x44bc2cf5ad770999ULL);
  EXPECT_EQ(checksum_of(sequence(100, 1, 0)), 0x6ac1e58032166597ULL);
  EXPECT_EQ(checksum_of(sequence(1000, 7, 3)), 0x5f235fa033f1a3fbULL);
}

TEST(ChecksumTest, PiecesOfAnySizeGiveTheDigestOfTheWhole) {
  const std::string whole = sequence(1000, 7, 3);
  for (const std::size_t piece : {1U, 3U, 31U, 32U, 33U, 500U}) {
    Checksum checksum;
    for (std::size_t at = 0; at < whole.size(); at += piece) {
      checksum.update(whole.data() + at, std::min(piece, whole.size() - at));
    }
    EXPECT_EQ(checksum.value(), 0x5f235fa033f1a3fbULL) << piece;
  }
}

TEST(ChecksumTest, EveryBitCounts) {
  const std::string whole = sequence(77, 5, 1);
  const std::uint64_t digest = checksum_of(whole);
  for (std::size_t bit = 0; bit < whole.size() * 8; ++bit) {
    std::string other = whole;
    other[bit / 8] = static_cast<char>(other[bit / 8] ^ (1 << (bit % 8)));
    ASSERT_NE(checksum_of(other), digest) << bit;
  }
}

TEST(ChecksumTest, TextHasAllDigits) {
  EXPECT_EQ(checksum_text(0x1fULL), "xxh64:000000000000001f");
}

}  // namespace
}  // namespace hypershard::checkpoint::internal
