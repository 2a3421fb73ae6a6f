// Why: every message prints values through text_of; each kind of value keeps its documented form.
#include "hypershard/core/text.h"

#include <array>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace other {

enum class Kind { kFlat };
std::string to_text(const Kind&) {
  return "Flat";
}

enum class Viewed { kShard };
std::string_view to_text(Viewed) {
  return "Shard";
}

enum class Plain : std::uint8_t { kSeven = 7 };

struct Streamed {
  int value;
};
std::ostream& operator<<(std::ostream& stream, const Streamed& streamed) {
  return stream << "<" << streamed.value << ">";
}

}  // namespace other

namespace hypershard {
namespace {

TEST(TextTest, WritesIntegersOfEveryWidth) {
  EXPECT_EQ(text_of(-3), "-3");
  EXPECT_EQ(text_of(std::uint8_t{200}), "200");
  EXPECT_EQ(text_of(std::int8_t{-5}), "-5");
  EXPECT_EQ(text_of(std::numeric_limits<std::uint64_t>::max()), "18446744073709551615");
  EXPECT_EQ(text_of(std::numeric_limits<std::int64_t>::min()), "-9223372036854775808");
}

TEST(TextTest, WritesBoolsAndLetters) {
  EXPECT_EQ(text_of(true), "true");
  EXPECT_EQ(text_of('x'), "x");
}

TEST(TextTest, WritesFloatsSoThatTheyReadBack) {
  EXPECT_EQ(text_of(0.1), "0.1");
  EXPECT_EQ(text_of(0.1F), "0.1");
  EXPECT_EQ(text_of(1.0 / 3), "0.3333333333333333");
  EXPECT_EQ(text_of(1e300), "1e+300");
  EXPECT_EQ(text_of(std::numeric_limits<double>::infinity()), "inf");
  EXPECT_EQ(text_of(std::numeric_limits<double>::quiet_NaN()), "nan");
}

TEST(TextTest, WritesStringsAsTheyAre) {
  const char* null = nullptr;
  EXPECT_EQ(text_of("literal"), "literal");
  EXPECT_EQ(text_of(std::string_view("view")), "view");
  EXPECT_EQ(text_of(null), "null");
}

TEST(TextTest, WritesRanges) {
  const std::vector<int> values = {1, 2, 3};
  EXPECT_EQ(text_of(values), "[1, 2, 3]");
  EXPECT_EQ(text_of(std::span<const int>(values).first(2)), "[1, 2]");
  EXPECT_EQ(text_of(std::array<double, 1>{0.5}), "[0.5]");
  EXPECT_EQ(text_of(std::vector<bool>{true, false}), "[true, false]");
  EXPECT_EQ(text_of(std::vector<std::vector<int>>{{1}, {}}), "[[1], []]");
  EXPECT_EQ(text_of(std::map<std::string, int>{{"a", 1}}), "[a: 1]");
}

TEST(TextTest, CutsLongRanges) {
  EXPECT_EQ(text_of(std::vector<int>(16, 7)), "[7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7]");
  EXPECT_EQ(
      text_of(std::vector<int>(17, 7)),
      "[7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, ... (17 in all)]"
  );
}

TEST(TextTest, WritesOptionals) {
  EXPECT_EQ(text_of(std::optional<int>(4)), "4");
  EXPECT_EQ(text_of(std::optional<int>()), "none");
}

TEST(TextTest, PrefersATypesOwnForm) {
  EXPECT_EQ(text_of(other::Kind::kFlat), "Flat");
  EXPECT_EQ(text_of(std::vector<other::Kind>{other::Kind::kFlat}), "[Flat]");
  EXPECT_EQ(text_of(other::Viewed::kShard), "Shard");
}

TEST(TextTest, FallsBackToStreamingThenToNumbers) {
  EXPECT_EQ(text_of(other::Streamed{3}), "<3>");
  EXPECT_EQ(text_of(other::Plain::kSeven), "7");
  EXPECT_EQ(text_of(std::filesystem::path("/a/b")), "\"/a/b\"");
}

TEST(TextTest, WritesPointersAsAddresses) {
  EXPECT_EQ(text_of(reinterpret_cast<int*>(0xbeef)), "0xbeef");
  EXPECT_EQ(text_of(static_cast<void*>(nullptr)), "null");
  EXPECT_EQ(text_of(nullptr), "null");
}

TEST(TextTest, ConcatenatesMixedParts) {
  EXPECT_EQ(concat_text("rank ", 3, " of ", 8U, ": ", 0.5), "rank 3 of 8: 0.5");
  EXPECT_EQ(concat_text(), "");
}

}  // namespace
}  // namespace hypershard
