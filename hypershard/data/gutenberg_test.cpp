// Why: the rule cuts text away for good, so its every clause has an example, and so has leaving
// alone.
#include "hypershard/data/gutenberg.h"

#include <string>

#include <gtest/gtest.h>

namespace hypershard::data {
namespace {

constexpr const char* kHead =
    "The Project Gutenberg eBook of A Made Play, by Nobody\n\nThis eBook is for the use of "
    "anyone.\n\n"
    "*** START OF THE PROJECT GUTENBERG EBOOK A MADE PLAY ***\n\n";
constexpr const char* kTail =
    "\n\n*** END OF THE PROJECT GUTENBERG EBOOK A MADE PLAY ***\n\nUpdated editions will replace "
    "it.\n";

std::string with_crlf(const std::string& text) {
  std::string result;
  for (const char character : text) {
    result += character == '\n' ? std::string("\r\n") : std::string(1, character);
  }
  return result;
}

TEST(GutenbergTest, KeepsWhatTheMarkersEnclose) {
  const std::string body = "ACT I\n\nFIRST VOICE.\nWho's there?\n";
  const std::string text = kHead + body + kTail;
  const GutenbergBody found = strip_gutenberg(text);
  EXPECT_EQ(found.body, body);
  EXPECT_EQ(found.head_bytes, std::string(kHead).size());
  EXPECT_EQ(found.tail_bytes, std::string(kTail).size());
}

TEST(GutenbergTest, KeepsCrLfOfTheBody) {
  const std::string body = "ACT I\r\n\r\nWho's there?\r\n";
  EXPECT_EQ(strip_gutenberg(with_crlf(kHead) + body + with_crlf(kTail)).body, body);
}

TEST(GutenbergTest, LeavesTextWithoutMarkersAlone) {
  const std::string text = "\n\n  A play.\n\n\nThe end.\n\n\n";
  const GutenbergBody found = strip_gutenberg(text);
  EXPECT_EQ(found.body, text);
  EXPECT_EQ(found.head_bytes + found.tail_bytes, 0u);
  EXPECT_FALSE(has_gutenberg_markers(text));
}

TEST(GutenbergTest, CutsOneSideIfOnlyOneMarkerIsThere) {
  const std::string body = "Some lines.\n";
  EXPECT_EQ(strip_gutenberg(kHead + body).body, body);
  EXPECT_EQ(strip_gutenberg("\n" + body + kTail).body, "\n" + body);
}

TEST(GutenbergTest, KnowsOlderMarkers) {
  const std::string text =
      "**Welcome To The World of Free Plain Vanilla Electronic Texts**\n"
      "*** START** SMALL PRINT! for PUBLIC DOMAIN ETEXTS **START***\nwords\n"
      "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n\n\n"
      "A Made Play\n\nEnd of this Project Gutenberg Etext of A Made Play\nmore\n";
  EXPECT_EQ(strip_gutenberg(text).body, "A Made Play\n");
}

TEST(GutenbergTest, MarkersMayLackSpacesDifferInCaseAndGoOnOverLines) {
  const std::string text =
      "x\n***Start of this Project Gutenberg EBook, A Play With a Very Long\nTitle In Two "
      "Lines***\n"
      "Body\n***END OF THIS PROJECT GUTENBERG EBOOK***\ny\n";
  EXPECT_EQ(strip_gutenberg(text).body, "Body\n");
}

TEST(GutenbergTest, AnUnclosedMarkerIsItsLineOnly) {
  const std::string text = "*** START OF THE PROJECT GUTENBERG EBOOK\na\nb\nc\nd\n";
  EXPECT_EQ(strip_gutenberg(text).body, "a\nb\nc\nd\n");
}

TEST(GutenbergTest, CutsCreditsBehindTheStartMarker) {
  const std::string body = "Produced fruit grew.\n";
  EXPECT_EQ(
      strip_gutenberg(
          kHead + std::string("Produced by A. Person and\nothers.\n\n\n") + body + kTail
      )
          .body,
      body
  );
}

TEST(GutenbergTest, TheLastStartMarkerCounts) {
  const std::string text = std::string(kHead) + "preface\n" + kHead + "Body\n" + kTail;
  EXPECT_EQ(strip_gutenberg(text).body, "Body\n");
}

TEST(GutenbergTest, TextAboutMarkersIsNotOne) {
  const std::string text = "He wrote: *** START OF THE PROJECT GUTENBERG EBOOK ***\nand so on.\n";
  EXPECT_EQ(strip_gutenberg(text).body, text);
}

TEST(GutenbergTest, NothingBetweenMarkersLeavesNothing) {
  EXPECT_EQ(strip_gutenberg(std::string(kHead) + kTail).body, "");
  EXPECT_EQ(strip_gutenberg("").body, "");
}

}  // namespace
}  // namespace hypershard::data
