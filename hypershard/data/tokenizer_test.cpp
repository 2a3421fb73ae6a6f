// Why: a tokenizer that loses a byte, or is another one than the data was made with, spoils a run.
// Bytes, descriptions and their refusals; SentencePiece has tests of its own.
#include "hypershard/data/tokenizer.h"

#include <numeric>

#include <gtest/gtest.h>

#include "hypershard/core/error.h"
#include "hypershard/data/scratch_folder.h"

namespace hypershard::data {
namespace {

TEST(TokenizerTest, BytesAreTokens) {
  const ByteTokenizer tokenizer;
  EXPECT_EQ(tokenizer.encode("A\xC3\xA9\xFF"), (std::vector<Token>{65, 0xC3, 0xA9, 0xFF}));
  EXPECT_EQ(tokenizer.vocab_size(), 256);
  EXPECT_EQ(tokenizer.name(), "byte");
  EXPECT_EQ(tokenizer.bos_id(), std::nullopt);
  EXPECT_EQ(tokenizer.eos_id(), 0);
}

TEST(TokenizerTest, EveryByteRoundTrips) {
  const ByteTokenizer tokenizer;
  std::string text(256, '\0');
  std::iota(text.begin(), text.end(), '\0');
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  EXPECT_TRUE(tokenizer.encode("").empty());
  EXPECT_EQ(tokenizer.decode({}), "");
}

TEST(TokenizerTest, RefusesForeignIds) {
  const ByteTokenizer tokenizer;
  const std::vector<Token> tokens = {1, 2, 256};
  const auto text = thrown_text<InvalidArgument>([&] { (void)tokenizer.decode(tokens); });
  HS_EXPECT_HAS(text, "token 256 at position 2");
  HS_EXPECT_HAS(text, "expected 0 to 255");
  EXPECT_THROW((void)tokenizer.decode(std::vector<Token>{-1}), InvalidArgument);
}

TEST(TokenizerTest, LoadsWhatItSaved) {
  const ScratchFolder folder;
  ByteTokenizer().save(folder.path());
  EXPECT_EQ(load_tokenizer(folder.path())->name(), "byte");
  EXPECT_EQ(load_tokenizer(folder / "tokenizer.json")->vocab_size(), 256);
}

TEST(TokenizerTest, RefusesMissingAndForeignDescriptions) {
  const ScratchFolder folder;
  HS_EXPECT_HAS(
      thrown_text<IoError>([&] { (void)load_tokenizer(folder.path()); }),
      "tokenizer.json: cannot be"
  );
  for (const char* content : {"", "[]", "{}", "not json", R"({"format": 3})"}) {
    folder.write("tokenizer.json", content);
    HS_EXPECT_HAS(
        thrown_text<IoError>([&] { (void)load_tokenizer(folder.path()); }),
        "is not a tokenizer description"
    );
  }
  folder.write("tokenizer.json", R"({"format": "hypershard.tokenizer", "type": "runes"})");
  HS_EXPECT_HAS(
      thrown_text<Unsupported>([&] { (void)load_tokenizer(folder.path()); }),
      "unknown tokenizer type 'runes'"
  );
  folder.write(
      "tokenizer.json", R"({"format": "hypershard.tokenizer", "type": "byte", "name": "other"})"
  );
  HS_EXPECT_HAS(
      thrown_text<IoError>([&] { (void)load_tokenizer(folder.path()); }),
      "describes tokenizer 'other' but its files hold 'byte'"
  );
}

}  // namespace
}  // namespace hypershard::data
