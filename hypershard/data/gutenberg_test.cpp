// Why: the rule cuts text away for good, so its every clause has an example.
// Text that only looks like a marker must stay.
#include "hypershard/data/gutenberg.h"

#include <initializer_list>
#include <string>

#include <gtest/gtest.h>

namespace hypershard::data {
namespace {

const std::string& head() {
  static const std::string text =
      "The Project Gutenberg eBook of A Made Play, by Nobody\n\nFor the use of anyone.\n\n"
      "*** START OF THE PROJECT GUTENBERG EBOOK A MADE PLAY ***\n\n";
  return text;
}

const std::string& tail() {
  static const std::string text =
      "\n\n*** END OF THE PROJECT GUTENBERG EBOOK A MADE PLAY ***\n\nUpdated editions follow.\n";
  return text;
}

std::string join(std::initializer_list<std::string> parts) {
  std::string text;
  for (const std::string& part : parts) {
    text += part;
  }
  return text;
}

std::string body_of(const std::string& text) {
  return std::string(strip_gutenberg(text).body);
}

std::string with_crlf(const std::string& text) {
  std::string result;
  for (const char character : text) {
    result += character == '\n' ? std::string("\r\n") : std::string(1, character);
  }
  return result;
}

TEST(GutenbergTest, KeepsWhatTheMarkersEnclose) {
  const std::string body = "ACT I\n\nFIRST VOICE.\nWho's there?\n";
  const std::string text = join({head(), body, tail()});
  const GutenbergBody found = strip_gutenberg(text);
  EXPECT_EQ(found.body, body);
  EXPECT_EQ(found.head_bytes, head().size());
  EXPECT_EQ(found.tail_bytes, tail().size());
  EXPECT_TRUE(has_gutenberg_markers(text));
}

TEST(GutenbergTest, KeepsCrLfOfTheBody) {
  const std::string body = "ACT I\r\n\r\nWho's there?\r\n";
  EXPECT_EQ(body_of(join({with_crlf(head()), body, with_crlf(tail())})), body);
}

TEST(GutenbergTest, LeavesTextWithoutMarkersAlone) {
  const std::string text = "\n\n  A play.\n\n\nThe end.\n\n\n";
  const GutenbergBody found = strip_gutenberg(text);
  EXPECT_EQ(found.body, text);
  EXPECT_EQ(found.head_bytes + found.tail_bytes, 0u);
  EXPECT_FALSE(has_gutenberg_markers(text));
}

TEST(GutenbergTest, CutsOneSideIfOnlyOneMarkerIsThere) {
  EXPECT_EQ(body_of(join({head(), "Some lines.\n\n"})), "Some lines.\n\n");
  EXPECT_EQ(body_of(join({"\nSome lines.\n", tail()})), "\nSome lines.\n");
}

TEST(GutenbergTest, KnowsOlderMarkers) {
  const std::string text =
      "**Welcome To The World of Free Plain Vanilla Electronic Texts**\n"
      "*** START** SMALL PRINT! for PUBLIC DOMAIN ETEXTS **START***\nwords\n"
      "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n\n\n"
      "A Made Play\n\nEnd of this Project Gutenberg Etext of A Made Play\nmore\n";
  EXPECT_EQ(body_of(text), "A Made Play\n");
}

TEST(GutenbergTest, MarkersMayLackSpacesDifferInCaseAndGoOnOverLines) {
  const std::string text =
      "x\n***Start of this Project Gutenberg EBook, A Play With a Very Long\nTitle In Two "
      "Lines***\n"
      "Body\n***END OF THIS PROJECT GUTENBERG EBOOK***\ny\n";
  EXPECT_EQ(body_of(text), "Body\n");
}

TEST(GutenbergTest, AnUnclosedMarkerIsItsLineOnly) {
  const std::string text = "*** START OF THE PROJECT GUTENBERG EBOOK\na\nb\nc\nd\n";
  EXPECT_EQ(body_of(text), "a\nb\nc\nd\n");
}

TEST(GutenbergTest, CutsCreditsBehindTheStartMarker) {
  const std::string credits = "Produced by A. Person and\nothers.\n\n\n";
  const std::string body = "Produced fruit grew.\n";
  EXPECT_EQ(body_of(join({head(), credits, body, tail()})), body);
}

TEST(GutenbergTest, TheLastStartMarkerCounts) {
  EXPECT_EQ(body_of(join({head(), "preface\n", head(), "Body\n", tail()})), "Body\n");
}

TEST(GutenbergTest, TextAboutMarkersIsNotOne) {
  const std::string text = "He wrote: *** START OF THE PROJECT GUTENBERG EBOOK ***\nand so on.\n";
  EXPECT_EQ(body_of(text), text);
}

TEST(GutenbergTest, NothingBetweenMarkersLeavesNothing) {
  EXPECT_EQ(body_of(join({head(), tail()})), "");
  EXPECT_EQ(body_of(""), "");
}

}  // namespace
}  // namespace hypershard::data
