// Why: hashes are written to files and compared between ranks and versions, so they have known
// answers.
#include "hypershard/core/hash.h"

#include <string>

#include <gtest/gtest.h>

namespace hypershard {
namespace {

TEST(HashTest, GivesThePublishedAnswers) {
  EXPECT_EQ(hash_bytes(""), 0xcbf29ce484222325ULL);
  EXPECT_EQ(hash_bytes("a"), 0xaf63dc4c8601ec8cULL);
  EXPECT_EQ(hash_bytes("foobar"), 0x85944171f73967e8ULL);
}

TEST(HashTest, GoesOnWhereItStopped) {
  EXPECT_EQ(hash_bytes("bar", hash_bytes("foo")), hash_bytes("foobar"));
  const std::string text = "foobar";
  EXPECT_EQ(hash_memory(text.data(), text.size()), hash_bytes("foobar"));
}

TEST(HashTest, TreatsBytesAsUnsigned) {
  EXPECT_EQ(hash_bytes("\xff"), (0xcbf29ce484222325ULL ^ 0xff) * 0x100000001b3ULL);
}

TEST(HashTest, CombinesIntegersLowByteFirst) {
  EXPECT_EQ(hash_combine(kHashSeed, 0x6f6f66), hash_bytes(std::string_view("foo\0\0\0\0\0", 8)));
}

TEST(HashTest, StreamsOfDifferentNamesDiffer) {
  EXPECT_NE(stream_of("blocks.1.w"), stream_of("blocks.2.w"));
  EXPECT_EQ(stream_of("a"), hash_bytes("a"));
}

}  // namespace
}  // namespace hypershard
