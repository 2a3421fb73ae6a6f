// Why: the library behind this tokenizer changes text by default; ours must not, for any bytes.
// The model is trained here, on a few lines of own text.
#include "hypershard/data/sentencepiece_tokenizer.h"

#include <algorithm>

#include <gtest/gtest.h>
#include <sentencepiece_trainer.h>

#include "hypershard/core/error.h"
#include "hypershard/core/random.h"
#include "hypershard/data/scratch_folder.h"

namespace hypershard::data {
namespace {

constexpr std::int64_t kVocabSize = 320;

// Own text: enough repetition for a few dozen merges.
std::string made_text() {
  std::string text;
  for (int i = 0; i < 40; ++i) {
    text += "The river runs past the mill, and the miller runs after the river.\n";
    text += "  \"Wherefore runs the miller?\" the river murmured; wherefore indeed.\n\n";
    text += "Na\xC3\xAFve caf\xC3\xA9 " + std::to_string(i) + ".\n";
  }
  return text;
}

NextText once(std::string text) {
  return [text = std::move(text), given = false](std::string& out) mutable {
    out = text;
    return !std::exchange(given, true);
  };
}

class SentencePieceTokenizerTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    model_ = new std::string(train_sentencepiece(once(made_text()), kVocabSize));
  }
  static void TearDownTestSuite() { delete model_; }
  static std::unique_ptr<Tokenizer> make() { return parse_sentencepiece(*model_, "the test"); }

  static std::string* model_;
};
std::string* SentencePieceTokenizerTest::model_ = nullptr;

TEST_F(SentencePieceTokenizerTest, HasTheSizeAskedFor) {
  const auto tokenizer = make();
  EXPECT_EQ(tokenizer->vocab_size(), kVocabSize);
  EXPECT_EQ(tokenizer->eos_id(), 1);
  EXPECT_EQ(tokenizer->bos_id(), std::nullopt);
  EXPECT_TRUE(tokenizer->name().starts_with("sentencepiece-320-")) << tokenizer->name();
  EXPECT_LT(tokenizer->encode(made_text()).size(), made_text().size() / 2);
}

TEST_F(SentencePieceTokenizerTest, KeepsEveryText) {
  const auto tokenizer = make();
  for (const std::string& text : {
           std::string(),
           made_text(),
           std::string("  two  spaces,\ttabs,\r\n\r\nand ends \n "),
           std::string("\xEF\xAC\x81ne \xEF\xBC\xA1 e\xCC\x81 \xC3\xA9 \xE3\x80\x80"
           ),                                                         // normalisers' prey
           std::string("\xE6\x97\xA5\xE6\x9C\xAC \xF0\x9F\x98\x80"),  // unseen characters
           std::string("a\xE2\x96\x81 \xE2\x96\x81\xE2\x96\x81 b"),   // the library's own space
           std::string("\xFF\xC3(\xE2\x82 \x80river\xED\xA0\x80"),    // not UTF-8
           std::string("zero\0byte", 9),
           std::string("<s></s><unk><0x41> <0x0A>"),
           std::string("\xEF\xBF\xBD"),  // the replacement character itself
       }) {
    EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text);
  }
}

TEST_F(SentencePieceTokenizerTest, KeepsRandomBytes) {
  const auto tokenizer = make();
  for (std::uint64_t trial = 0; trial < 200; ++trial) {
    std::string text;
    const std::uint64_t length = index_below(64, /*seed=*/1, /*stream=*/0, trial);
    for (std::uint64_t i = 0; i < length; ++i) {
      text += static_cast<char>(index_below(256, /*seed=*/1, /*stream=*/trial + 1, i));
    }
    EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text) << "trial " << trial;
  }
}

TEST_F(SentencePieceTokenizerTest, ConcatenationOfDecodedPartsIsTheDecodedWhole) {
  const auto tokenizer = make();
  const auto tokens = tokenizer->encode("The river runs past the caf\xC3\xA9.");
  std::string text;
  for (const Token& token : tokens) {
    text += tokenizer->decode({&token, 1});
  }
  EXPECT_EQ(text, "The river runs past the caf\xC3\xA9.");
}

TEST_F(SentencePieceTokenizerTest, EndOfTextDecodesToNothingAndForeignIdsAreRefused) {
  const auto tokenizer = make();
  EXPECT_EQ(tokenizer->decode(std::vector<Token>{*tokenizer->eos_id()}), "");
  HS_EXPECT_HAS(
      thrown_text<InvalidArgument>([&] { (void)tokenizer->decode(std::vector<Token>{5, 320}); }),
      "token 320 at position 1"
  );
}

TEST_F(SentencePieceTokenizerTest, TrainingIsReproducibleAndKnowsNoPaths) {
  EXPECT_EQ(train_sentencepiece(once(made_text()), kVocabSize), *model_);
  const ScratchFolder a;
  const ScratchFolder b;
  train_sentencepiece({a.write("one.txt", made_text())}, a / "vocabulary", kVocabSize);
  train_sentencepiece({b.write("two.txt", made_text())}, b / "other", kVocabSize);
  EXPECT_EQ(content_of(a / "vocabulary.model"), *model_);
  EXPECT_EQ(content_of(b / "other.model"), *model_);
}

TEST_F(SentencePieceTokenizerTest, LoadsWhatItSaved) {
  const ScratchFolder folder;
  const auto tokenizer = make();
  tokenizer->save(folder.path());
  for (const std::string& path :
       {folder.path(), folder / "tokenizer.json", folder / "tokenizer.model"}) {
    const auto loaded = load_tokenizer(path);
    EXPECT_EQ(loaded->name(), tokenizer->name());
    EXPECT_EQ(loaded->encode("the mill"), tokenizer->encode("the mill"));
  }
}

TEST_F(SentencePieceTokenizerTest, RefusesImpossibleVocabularies) {
  HS_EXPECT_HAS(
      thrown_text<InvalidArgument>([] { (void)train_sentencepiece(once(made_text()), 258); }),
      "vocab_size 258 leaves no room"
  );
  HS_EXPECT_HAS(
      thrown_text<InvalidArgument>([] { (void)train_sentencepiece(once(made_text()), 262); }),
      "a vocabulary of 262 cannot be trained on this text"
  );
  HS_EXPECT_HAS(
      thrown_text<InvalidArgument>([] { (void)train_sentencepiece(once("tiny text"), 100'000); }),
      "a vocabulary of 100000 cannot be trained on this text"
  );
  HS_EXPECT_HAS(
      thrown_text<InvalidArgument>([] { (void)train_sentencepiece(once(""), 1000); }), "no text"
  );
}

TEST_F(SentencePieceTokenizerTest, TrainsOnLinesOfAnyLengthAndBytes) {
  std::string text = made_text();
  std::replace(text.begin(), text.end(), '\n', ' ');
  text += "\xFF\xFE" + std::string("zero\0byte", 9) + std::string(9000, '\x80');
  const auto tokenizer =
      parse_sentencepiece(train_sentencepiece(once(text), kVocabSize), "the test");
  EXPECT_EQ(tokenizer->decode(tokenizer->encode(text)), text);
  EXPECT_LT(tokenizer->encode("the river runs").size(), 8u);
}

TEST_F(SentencePieceTokenizerTest, RefusesWhatIsNotAModel) {
  const ScratchFolder folder;
  HS_EXPECT_HAS(
      thrown_text<IoError>([&] { (void)load_tokenizer(folder / "none.model"); }), "none.model"
  );
  for (const std::string& content :
       {std::string(), std::string("not a model"), model_->substr(0, 500)}) {
    const std::string path = folder.write("bad.model", content);
    HS_EXPECT_HAS(
        thrown_text<IoError>([&] { (void)load_tokenizer(path); }), "is not a SentencePiece model"
    );
  }
}

// A model with the library's defaults: a space in front, NFKC, no byte pieces.
TEST_F(SentencePieceTokenizerTest, ForeignModelsKeepTheirOwnNormalisation) {
  class Lines final : public sentencepiece::SentenceIterator {
   public:
    bool done() const override { return count_ == 50; }
    void Next() override { ++count_; }
    const std::string& value() const override { return line_; }
    sentencepiece::util::Status status() const override { return {}; }

   private:
    int count_ = 0;
    std::string line_ = "the river runs past the mill and the miller";
  };
  Lines lines;
  std::string model;
  ASSERT_TRUE(
      sentencepiece::SentencePieceTrainer::Train(
          {{"model_type", "bpe"}, {"vocab_size", "40"}, {"minloglevel", "2"}}, &lines, &model
      )
          .ok()
  );
  const auto tokenizer = parse_sentencepiece(model, "the test");
  EXPECT_EQ(tokenizer->decode(tokenizer->encode("the  river ")), "the river");
  EXPECT_EQ(tokenizer->bos_id(), 1);
}

}  // namespace
}  // namespace hypershard::data
