// Why: a build without the library must say what is missing, whatever it is asked for.
// The stub is linked here alone.
#include <gtest/gtest.h>

#include "hypershard/core/error.h"
#include "hypershard/data/scratch_folder.h"
#include "hypershard/data/sentencepiece_tokenizer.h"

namespace hypershard::data {
namespace {

TEST(NoSentencePieceTest, SaysWhatIsMissing) {
  EXPECT_FALSE(has_sentencepiece());
  const NextText none = [](std::string&) { return false; };
  for (const std::string& text :
       {thrown_text<Unsupported>([] { (void)load_sentencepiece("some.model"); }),
        thrown_text<Unsupported>([] { (void)parse_sentencepiece("", "some.model"); }),
        thrown_text<Unsupported>([] { train_sentencepiece({"a.txt"}, "some", 1000); })}) {
    HS_EXPECT_HAS(text, "some.model");
    HS_EXPECT_HAS(text, "HS_WITH_SENTENCEPIECE");
  }
  HS_EXPECT_HAS(
      thrown_text<Unsupported>([&] { (void)train_sentencepiece(none, 1000); }), "vocabulary of 1000"
  );
}

}  // namespace
}  // namespace hypershard::data
