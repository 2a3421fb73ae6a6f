// Why: what counts as UTF-8 decides which files are refused and which bytes a tokenizer keeps raw.
// The cases are the borders of the table in the Unicode standard.
#include "hypershard/data/internal/utf8.h"

#include <gtest/gtest.h>

namespace hypershard::data::internal {
namespace {

TEST(Utf8Test, AcceptsTheFirstAndLastSequenceOfEachLength) {
  for (const std::string_view text :
       {std::string_view("\0", 1),
        std::string_view("\x7F"),
        std::string_view("\xC2\x80"),
        std::string_view("\xDF\xBF"),
        std::string_view("\xE0\xA0\x80"),
        std::string_view("\xED\x9F\xBF"),
        std::string_view("\xEE\x80\x80"),
        std::string_view("\xEF\xBF\xBF"),
        std::string_view("\xF0\x90\x80\x80"),
        std::string_view("\xF4\x8F\xBF\xBF")}) {
    EXPECT_EQ(utf8_sequence_length(text, 0), text.size());
    EXPECT_TRUE(scan_utf8(text).valid);
  }
}

TEST(Utf8Test, RejectsWhatTheStandardForbids) {
  for (const std::string_view text :
       {"\x80",              // a continuation alone
        "\xC0\x80",          // overlong
        "\xC1\xBF",          // overlong
        "\xE0\x9F\xBF",      // overlong
        "\xED\xA0\x80",      // a surrogate
        "\xF0\x8F\xBF\xBF",  // overlong
        "\xF4\x90\x80\x80",  // above U+10FFFF
        "\xF5\x80\x80\x80",  // above U+10FFFF
        "\xFF",
        "\xE2\x82",  // cut off
        "\xE2\x82"
        "A"}) {  // continuation missing
    EXPECT_EQ(utf8_sequence_length(text, 0), 0u);
    EXPECT_FALSE(scan_utf8(text).valid);
  }
}

TEST(Utf8Test, ScanCountsAndPlacesFaults) {
  const Utf8Scan scan = scan_utf8("ab\xC3\xA9\xFFz\x80");
  EXPECT_FALSE(scan.valid);
  EXPECT_EQ(scan.first_invalid, 4u);
  EXPECT_EQ(scan.num_multibyte, 1u);
  EXPECT_EQ(scan.num_invalid, 2u);
}

TEST(Utf8Test, Latin1BecomesTheSameCharacters) {
  EXPECT_EQ(latin1_to_utf8("caf\xE9 \x80\xFF"), "caf\xC3\xA9 \xC2\x80\xC3\xBF");
}

TEST(Utf8Test, PrefixNeverCutsACharacter) {
  const std::string_view text =
      "a\xE2\x82\xAC"
      "b";
  EXPECT_EQ(utf8_prefix(text, 1), "a");
  EXPECT_EQ(utf8_prefix(text, 2), "a");
  EXPECT_EQ(utf8_prefix(text, 3), "a");
  EXPECT_EQ(utf8_prefix(text, 4), "a\xE2\x82\xAC");
  EXPECT_EQ(utf8_prefix(text, 9), text);
}

}  // namespace
}  // namespace hypershard::data::internal
