// Why: preparation is the first thing a user runs on files of their own.
// Its refusals matter most: each is tested with its text, and that nothing was written.
#include "hypershard/data/prepare.h"

#include <map>
#include <sys/stat.h>

#include <gtest/gtest.h>

#include "hypershard/core/error.h"
#include "hypershard/data/scratch_folder.h"
#include "hypershard/data/sentencepiece_tokenizer.h"
#include "hypershard/data/token_file.h"

namespace hypershard::data {
namespace {

namespace fs = std::filesystem;

constexpr const char* kWrapped =
    "Licence\n*** START OF THE PROJECT GUTENBERG EBOOK X ***\n\nWRAPPED\n\nBody.\n"
    "*** END OF THE PROJECT GUTENBERG EBOOK X ***\nLicence\n";

class PrepareTest : public ::testing::Test {
 protected:
  // Three documents, one of them in a folder below.
  void write_corpus() {
    folder_.write("texts/alpha.txt", "THE ALPHA\n\nalpha alpha\n");
    folder_.write("texts/beta.txt", "THE BETA\r\nbeta\r\n");
    folder_.write("texts/more/gamma.txt", "THE GAMMA\ngamma gamma gamma");
    folder_.write("texts/notes.md", "not a text");
    folder_.write("texts/.hidden.txt", "hidden");
    folder_.write("texts/.git/x.txt", "hidden");
  }

  PrepareOptions options(std::vector<std::string> holdout = {"beta"}) const {
    PrepareOptions result;
    result.out_dir = folder_ / "out";
    result.holdout = std::move(holdout);
    return result;
  }

  std::string texts() const { return folder_ / "texts"; }

  std::string text_of_split(const std::string& split) const {
    const TokenFile file(folder_ / ("out/" + split + ".tokens"));
    std::vector<std::int64_t> tokens(file.num_tokens());
    file.read(0, tokens);
    const std::vector<Token> ids(tokens.begin(), tokens.end());
    return load_tokenizer(folder_ / "out")->decode(ids);
  }

  // Every file of the folder with its content.
  std::map<std::string, std::string> contents(const std::string& name) const {
    std::map<std::string, std::string> files;
    for (const auto& entry : fs::directory_iterator(folder_ / name)) {
      files[entry.path().filename().string()] = content_of(entry.path().string());
    }
    return files;
  }

  template <class Type>
  std::string fault(const std::vector<std::string>& paths, const PrepareOptions& options) const {
    const std::string text = thrown_text<Type>([&] { (void)prepare_text(paths, options); });
    EXPECT_FALSE(fs::exists(options.out_dir)) << "an input's fault must be found before writing";
    return text;
  }

  ScratchFolder folder_;
};

TEST_F(PrepareTest, WritesBothSplitsInNameOrder) {
  write_corpus();
  const PrepareReport report = prepare_text({texts()}, options());
  using namespace std::string_literals;
  EXPECT_EQ(text_of_split("train"), "THE ALPHA\n\nalpha alpha\n\0THE GAMMA\ngamma gamma gamma\0"s);
  EXPECT_EQ(text_of_split("val"), "THE BETA\r\nbeta\r\n\0"s);
  EXPECT_FALSE(report.unchanged);
  EXPECT_TRUE(report.warnings.empty());
  EXPECT_EQ(report.data.vocab_size, 256);
  EXPECT_EQ(report.data.train.documents, (std::vector<std::string>{"alpha", "more/gamma"}));
  EXPECT_EQ(report.data.val.documents, std::vector<std::string>{"beta"});
  EXPECT_EQ(report.data.val.num_tokens, 17u);
  EXPECT_EQ(report.data.val.text_bytes, 16u);
  EXPECT_DOUBLE_EQ(report.data.val.bytes_per_token(), 16.0 / 17.0);
  HS_EXPECT_HAS(to_text(report), "val: 17 tokens, 1 document, 16 bytes of text");
}

TEST_F(PrepareTest, OpenPreparedTellsTheSame) {
  write_corpus();
  const PreparedData written = prepare_text({texts()}, options()).data;
  const PreparedData opened = open_prepared(folder_ / "out");
  EXPECT_EQ(opened.tokenizer_name, "byte");
  EXPECT_EQ(opened.tokenizer_path, written.tokenizer_path);
  EXPECT_EQ(opened.train.path, written.train.path);
  EXPECT_EQ(opened.train.num_tokens, written.train.num_tokens);
  EXPECT_EQ(opened.val.documents, written.val.documents);
  EXPECT_EQ(opened.val.text_bytes, written.val.text_bytes);
}

TEST_F(PrepareTest, SecondRunChangesNothingAndSaysSo) {
  write_corpus();
  prepare_text({texts()}, options());
  const auto before = contents("out");
  const auto time = fs::last_write_time(folder_ / "out/train.tokens");
  const PrepareReport again = prepare_text({texts()}, options());
  EXPECT_TRUE(again.unchanged);
  EXPECT_EQ(again.data.train.num_tokens, open_prepared(folder_ / "out").train.num_tokens);
  EXPECT_EQ(contents("out"), before);
  EXPECT_EQ(fs::last_write_time(folder_ / "out/train.tokens"), time);
  HS_EXPECT_HAS(to_text(again), "unchanged: ");
}

TEST_F(PrepareTest, SameInputGivesSameBytesAnywhere) {
  write_corpus();
  fs::create_directories(folder_ / "elsewhere");
  fs::copy(texts(), folder_ / "elsewhere/copy", fs::copy_options::recursive);
  PrepareOptions other = options();
  other.out_dir = folder_ / "out2/deep";
  prepare_text({texts()}, options());
  prepare_text({folder_ / "elsewhere/copy/"}, other);
  EXPECT_EQ(contents("out"), contents("out2/deep"));
}

TEST_F(PrepareTest, AnyChangeOfInputOptionsOrOutputIsNoticed) {
  write_corpus();
  const auto is_unchanged = [&](const PrepareOptions& changed) {
    return prepare_text({texts()}, changed).unchanged;
  };
  EXPECT_FALSE(is_unchanged(options()));
  EXPECT_TRUE(is_unchanged(options()));
  EXPECT_FALSE(is_unchanged(options({"alpha"})));
  EXPECT_FALSE(is_unchanged(options()));
  folder_.write("texts/alpha.txt", "THE ALPHA\n\nalpha Alpha\n");
  EXPECT_FALSE(is_unchanged(options()));
  folder_.write("texts/delta.txt", "delta");
  EXPECT_FALSE(is_unchanged(options()));
  EXPECT_TRUE(is_unchanged(options()));
  fs::remove(folder_ / "out/val.tokens");
  EXPECT_FALSE(is_unchanged(options()));
  folder_.write("out/train.tokens", "damaged");
  EXPECT_FALSE(is_unchanged(options()));
  folder_.write("out/tokenizer.json", "damaged");
  EXPECT_FALSE(is_unchanged(options()));
  folder_.write("out/manifest.json", "{\"format\": \"hypershard.data\", \"version\": 1}");
  EXPECT_FALSE(is_unchanged(options()));
  EXPECT_TRUE(is_unchanged(options()));
}

TEST_F(PrepareTest, RemovesWhatAnEarlierPreparationLeft) {
  write_corpus();
  prepare_text({texts()}, options());
  PrepareOptions whole = options({});
  whole.holdout_fraction = 0;
  const PrepareReport report = prepare_text({texts()}, whole);
  EXPECT_TRUE(report.data.val.path.empty());
  EXPECT_EQ(report.data.val.bytes_per_token(), 0.0);
  EXPECT_FALSE(fs::exists(folder_ / "out/val.tokens"));
  EXPECT_TRUE(open_prepared(folder_ / "out").val.path.empty());
  EXPECT_TRUE(prepare_text({texts()}, whole).unchanged);
  HS_EXPECT_HAS(to_text(report), "val: none");
}

TEST_F(PrepareTest, TakesFilesAndFoldersOnceEach) {
  write_corpus();
  fs::create_symlink(texts() + "/alpha.txt", folder_ / "link.txt");
  const PrepareReport report = prepare_text(
      {texts() + "/alpha.txt", texts(), texts() + "/../texts/beta.txt", texts() + "/notes.md"},
      options()
  );
  EXPECT_EQ(
      report.data.train.documents, (std::vector<std::string>{"alpha", "more/gamma", "notes"})
  );
}

TEST_F(PrepareTest, IncludePatternsChooseFiles) {
  write_corpus();
  PrepareOptions chosen = options({"notes"});
  chosen.include = {"*.md", "more/*.txt"};
  EXPECT_EQ(
      prepare_text({texts()}, chosen).data.train.documents, std::vector<std::string>{"more/gamma"}
  );
}

TEST_F(PrepareTest, RefusesPathsAndFilesThatHoldNoText) {
  write_corpus();
  HS_EXPECT_HAS(fault<IoError>({folder_ / "nowhere"}, options()), "nowhere: cannot be read");
  HS_EXPECT_HAS(fault<InvalidArgument>({}, options()), "0 paths");
  PrepareOptions none = options();
  none.include = {"*.rst"};
  const std::string no_match = fault<InvalidArgument>({texts()}, none);
  HS_EXPECT_HAS(no_match, "no file matches [*.rst]");
  HS_EXPECT_HAS(no_match, "which hold 4 files");
  folder_.write("texts/empty.txt", "");
  HS_EXPECT_HAS(fault<InvalidArgument>({texts()}, options()), "empty.txt: holds no text: 0 bytes");
  folder_.write("texts/empty.txt", " \r\n\t\n");
  HS_EXPECT_HAS(fault<InvalidArgument>({texts()}, options()), "empty.txt: holds no text: 5 bytes");
  folder_.write("texts/empty.txt", std::string("abc\0def", 7));
  HS_EXPECT_HAS(
      fault<InvalidArgument>({texts()}, options()), "empty.txt: is not text: byte 3 is zero"
  );
  PrepareOptions nowhere = options();
  nowhere.out_dir = "";
  HS_EXPECT_HAS(fault<InvalidArgument>({texts()}, nowhere), "out_dir is ''");
}

TEST_F(PrepareTest, RefusesUnreadableFilesByName) {
  write_corpus();
  if (::geteuid() == 0) {
    // Root reads everything: a link to itself cannot be read by anyone.
    fs::create_symlink("loop.txt", folder_ / "loop.txt");
    HS_EXPECT_HAS(fault<IoError>({folder_ / "loop.txt"}, options()), "loop.txt: cannot be read");
    return;
  }
  ::chmod((texts() + "/alpha.txt").c_str(), 0);
  HS_EXPECT_HAS(
      fault<IoError>({texts()}, options()), "alpha.txt: cannot be opened: Permission denied"
  );
}

TEST_F(PrepareTest, RefusesTwoDocumentsOfOneName) {
  write_corpus();
  const std::string other = folder_.write("other/alpha.txt", "another alpha");
  const std::string text = fault<InvalidArgument>({texts(), other}, options());
  HS_EXPECT_HAS(text, "two files would both be document 'alpha'");
  HS_EXPECT_HAS(text, other);
}

TEST_F(PrepareTest, RefusesSplitsWithoutDocuments) {
  write_corpus();
  HS_EXPECT_HAS(fault<InvalidArgument>({texts()}, options({"alpa"})), "did you mean 'alpha'?");
  HS_EXPECT_HAS(fault<InvalidArgument>({texts()}, options({"*"})), "nothing is left to train on");
  HS_EXPECT_HAS(
      fault<InvalidArgument>({texts() + "/alpha.txt"}, options({})), "cut a large one into several"
  );
}

TEST_F(PrepareTest, RefusesAFolderThatCannotBeMade) {
  write_corpus();
  folder_.write("file", "in the way");
  PrepareOptions blocked = options();
  blocked.out_dir = folder_ / "file/out";
  HS_EXPECT_HAS(
      thrown_text<IoError>([&] { (void)prepare_text({texts()}, blocked); }),
      "file/out: cannot be made"
  );
  blocked.out_dir = folder_ / "file";
  HS_EXPECT_HAS(
      thrown_text<IoError>([&] { (void)prepare_text({texts()}, blocked); }), "file: cannot be made"
  );
}

TEST_F(PrepareTest, ReadsLatin1AndSaysSo) {
  folder_.write("texts/a.txt", "plain");
  folder_.write("texts/b.txt", "caf\xE9");
  folder_.write(
      "texts/c.txt",
      "\xEF\xBB\xBF"
      "caf\xC3\xA9"
  );
  const PrepareReport report = prepare_text({texts()}, options({"a"}));
  EXPECT_EQ(text_of_split("train"), std::string("caf\xC3\xA9\0caf\xC3\xA9\0", 12));
  ASSERT_EQ(report.warnings.size(), 1u);
  HS_EXPECT_HAS(report.warnings[0], "1 of 3 documents are not UTF-8 and were read as Latin-1: [b]");

  PrepareOptions strict = options({"a"});
  strict.encoding = TextEncoding::kUtf8;
  HS_EXPECT_HAS(
      thrown_text<InvalidArgument>([&] { (void)prepare_text({texts()}, strict); }),
      "b.txt: is not UTF-8: line 1, byte 3 is 0xe9"
  );
  strict.encoding = TextEncoding::kLatin1;
  EXPECT_TRUE(prepare_text({texts()}, strict).warnings.empty());
  EXPECT_EQ(
      text_of_split("train"),
      std::string(
          "caf\xC3\xA9\0\xC3\xAF\xC2\xBB\xC2\xBF"
          "caf\xC3\x83\xC2\xA9\0",
          20
      )
  );
}

TEST_F(PrepareTest, RefusesAMixtureOfEncodings) {
  folder_.write("texts/a.txt", "plain");
  folder_.write("texts/b.txt", "one\ncaf\xC3\xA9\ncaf\xE9\n");
  const std::string text = fault<InvalidArgument>({texts()}, options({"a"}));
  HS_EXPECT_HAS(text, "b.txt: is not UTF-8: line 3, byte 13 is 0xe9");
  HS_EXPECT_HAS(text, "1 UTF-8 sequences and 1 bytes outside any");
}

TEST_F(PrepareTest, StripsProjectGutenbergsWrappingIfAsked) {
  folder_.write("texts/a.txt", kWrapped);
  folder_.write("texts/b.txt", "PLAIN\n\nwords\n");
  PrepareOptions kept = options({"plain"});
  const PrepareReport report = prepare_text({texts()}, kept);
  EXPECT_EQ(text_of_split("train"), kWrapped + std::string(1, '\0'));
  ASSERT_EQ(report.warnings.size(), 1u);
  HS_EXPECT_HAS(report.warnings[0], "1 of 2 documents are wrapped in Project Gutenberg's licence");

  PrepareOptions stripped = options({"plain"});
  stripped.strip_gutenberg = true;
  EXPECT_TRUE(prepare_text({texts()}, stripped).warnings.empty());
  EXPECT_EQ(text_of_split("train"), std::string("WRAPPED\n\nBody.\n\0", 16));
  HS_EXPECT_HAS(content_of(folder_ / "out/manifest.json"), "\"title\": \"WRAPPED\"");

  fs::remove(folder_ / "texts/a.txt");
  folder_.write("texts/c.txt", "more\n");
  HS_EXPECT_HAS(prepare_text({texts()}, stripped).warnings.at(0), "nothing stripped");

  folder_.write("texts/d.txt", "*** START OF THE PROJECT GUTENBERG EBOOK X ***\n\n");
  HS_EXPECT_HAS(
      thrown_text<InvalidArgument>([&] { (void)prepare_text({texts()}, stripped); }),
      "d.txt without its Project Gutenberg wrapping: holds no text"
  );
}

TEST_F(PrepareTest, AFailedRunVouchesForNothing) {
  write_corpus();
  prepare_text({texts()}, options());
  fs::remove(folder_ / "out/val.tokens");
  fs::create_directories(folder_ / "out/val.tokens/in_the_way");
  EXPECT_THROW((void)prepare_text({texts()}, options({"beta", "alpha"})), IoError);
  HS_EXPECT_HAS(
      thrown_text<IoError>([&] { (void)open_prepared(folder_ / "out"); }), "holds no manifest.json"
  );
}

TEST_F(PrepareTest, OpenPreparedRefusesOtherFolders) {
  HS_EXPECT_HAS(
      thrown_text<IoError>([&] { (void)open_prepared(folder_ / "nowhere"); }),
      "is not a prepared folder"
  );
  for (const char* content :
       {"",
        "{}",
        "{\"format\": \"hypershard.data\", \"version\": 99}",
        "{\"format\": \"hypershard.data\", \"version\": 1, \"options\": {}}"}) {
    folder_.write("out/manifest.json", content);
    HS_EXPECT_HAS(
        thrown_text<IoError>([&] { (void)open_prepared(folder_ / "out"); }),
        "is damaged or of another"
    );
  }
}

TEST_F(PrepareTest, SentencePieceLearnsFromTheTrainSplitOnly) {
  if (!has_sentencepiece()) {
    GTEST_SKIP() << "this build is without SentencePiece";
  }
  std::string common;
  for (int i = 0; i < 60; ++i) {
    common += "the river runs past the mill and the miller sees the river run\n";
  }
  folder_.write("texts/a.txt", common);
  folder_.write("texts/b.txt", common + "and more\n");
  folder_.write("texts/c.txt", common);
  PrepareOptions trained = options({"c"});
  trained.tokenizer = TokenizerKind::kSentencePiece;
  trained.vocab_size = 300;
  const PrepareReport report = prepare_text({texts()}, trained);
  EXPECT_EQ(report.data.vocab_size, 300);
  EXPECT_GT(report.data.train.bytes_per_token(), 2.0);
  EXPECT_EQ(load_tokenizer(folder_ / "out")->name(), report.data.tokenizer_name);
  EXPECT_EQ(text_of_split("val"), common);
  EXPECT_TRUE(prepare_text({texts()}, trained).unchanged);

  // Another held-out text does not change the vocabulary; another training text does.
  const std::string model = content_of(folder_ / "out/tokenizer.model");
  folder_.write("texts/c.txt", "quite other words in here\n" + common);
  EXPECT_FALSE(prepare_text({texts()}, trained).unchanged);
  EXPECT_EQ(content_of(folder_ / "out/tokenizer.model"), model);
  folder_.write("texts/b.txt", common + "quite other words in here, quite other words in here\n");
  prepare_text({texts()}, trained);
  EXPECT_NE(content_of(folder_ / "out/tokenizer.model"), model);

  prepare_text({texts()}, options({"c"}));
  EXPECT_FALSE(fs::exists(folder_ / "out/tokenizer.model"));
}

}  // namespace
}  // namespace hypershard::data
