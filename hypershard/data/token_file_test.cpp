// Why: a token file that is torn, foreign or damaged must be refused by name.
// Whatever byte is wrong: every one is tried.
#include "hypershard/data/token_file.h"

#include <csignal>
#include <cstring>
#include <numeric>
#include <sys/resource.h>

#include <gtest/gtest.h>

#include "hypershard/core/error.h"
#include "hypershard/data/internal/token_format.h"
#include "hypershard/data/scratch_folder.h"

namespace hypershard::data {
namespace {

using internal::TokenHeader;

std::vector<std::int64_t> all_tokens(const TokenFile& file) {
  std::vector<std::int64_t> tokens(file.num_tokens());
  file.read(0, tokens);
  return tokens;
}

// Two documents: 1 2 3 and 4 5, each with separator 0 behind it.
std::string write_small(const ScratchFolder& folder, std::int64_t vocab_size = 100) {
  const std::string path = folder / "small.tokens";
  TokenFileWriter writer(
      path, {.tokenizer_name = "made", .vocab_size = vocab_size, .separator = 0}
  );
  writer.begin_document("first", 30);
  writer.append(std::vector<Token>{1, 2});
  writer.append(std::vector<Token>{3});
  writer.end_document();
  writer.begin_document("second", 20);
  writer.append(std::vector<Token>{4, 5});
  writer.end_document();
  writer.finish();
  return path;
}

TokenHeader header_of(const std::string& content) {
  TokenHeader header;
  std::memcpy(&header, content.data(), sizeof(header));
  return header;
}

// Puts a header with a right checksum in front of `content`.
std::string with_header(std::string content, TokenHeader header) {
  header.header_checksum = checksum_of(header);
  std::memcpy(content.data(), &header, sizeof(header));
  return content;
}

std::string open_fault(const std::string& path) {
  return thrown_text<IoError>([&] { const TokenFile file(path); });
}

TEST(TokenFileTest, ReadsBackWhatWasWritten) {
  const ScratchFolder folder;
  const TokenFile file(write_small(folder));
  EXPECT_EQ(all_tokens(file), (std::vector<std::int64_t>{1, 2, 3, 0, 4, 5, 0}));
  EXPECT_EQ(file.info().tokenizer_name, "made");
  EXPECT_EQ(file.vocab_size(), 100);
  EXPECT_EQ(file.info().token_bytes, 1);
  EXPECT_EQ(file.info().separator, 0);
  EXPECT_EQ(file.info().text_bytes, 50u);
  ASSERT_EQ(file.documents().size(), 2u);
  EXPECT_EQ(file.documents()[1].name, "second");
  EXPECT_EQ(file.documents()[1].begin, 4u);
  EXPECT_EQ(file.documents()[1].end, 6u);
  EXPECT_EQ(file.documents()[1].text_bytes, 20u);
  file.verify();
}

TEST(TokenFileTest, StoresTokensInTheSmallestType) {
  const ScratchFolder folder;
  for (const auto& [vocab_size, token_bytes] :
       std::vector<std::pair<std::int64_t, int>>{{256, 1}, {257, 2}, {65536, 2}, {65537, 4}}) {
    const std::string path = folder / "x.tokens";
    TokenFileWriter writer(
        path, {.tokenizer_name = "made", .vocab_size = vocab_size, .separator = {}}
    );
    std::vector<Token> tokens(200'000);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = static_cast<Token>(i * 7919 % static_cast<std::size_t>(vocab_size));
    }
    tokens.back() = static_cast<Token>(vocab_size - 1);
    writer.begin_document("only", 1);
    writer.append(tokens);
    writer.end_document();
    EXPECT_EQ(writer.finish().token_bytes, token_bytes);
    const TokenFile file(path, AccessPattern::kSequential);
    EXPECT_EQ(file.info().token_bytes, token_bytes);
    EXPECT_EQ(file.info().separator, std::nullopt);
    EXPECT_EQ(all_tokens(file), std::vector<std::int64_t>(tokens.begin(), tokens.end()));
    file.will_need(10, 100);
    file.will_need(file.num_tokens() + 5, 100);
    file.verify();
  }
}

TEST(TokenFileTest, RefusesRangesOutsideTheFile) {
  const ScratchFolder folder;
  const TokenFile file(write_small(folder));
  std::vector<std::int64_t> two(2);
  file.read(5, two);
  HS_EXPECT_HAS(thrown_text<InvalidArgument>([&] { file.read(6, two); }), "it holds 7");
  EXPECT_THROW(file.read(~std::uint64_t{0}, two), InvalidArgument);
}

TEST(TokenFileTest, RefusesWhatIsNoTokenFile) {
  const ScratchFolder folder;
  HS_EXPECT_HAS(open_fault(folder / "none.tokens"), "none.tokens: cannot be opened: No such file");
  HS_EXPECT_HAS(open_fault(folder.path()), "is not a regular file");
  HS_EXPECT_HAS(open_fault(folder.write("empty.tokens", "")), "0 bytes (expected at least 128)");
  const std::string fault = open_fault(folder.write("text.tokens", std::string(500, 'a')));
  HS_EXPECT_HAS(fault, "text.tokens: is not a token file: it begins with bytes 6161616161616161");
  HS_EXPECT_HAS(fault, "expected 4853544f4b454e53");
}

TEST(TokenFileTest, RefusesEveryTruncation) {
  const ScratchFolder folder;
  const std::string whole = content_of(write_small(folder));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    const std::string path = folder.write("cut.tokens", whole.substr(0, size));
    HS_EXPECT_HAS(open_fault(path), "truncated");
  }
  HS_EXPECT_HAS(
      open_fault(folder / "cut.tokens"),
      concat_text(whole.size() - 1, " bytes (expected ", whole.size(), ")")
  );
}

TEST(TokenFileTest, RefusesEveryChangedByteOfHeaderAndTable) {
  const ScratchFolder folder;
  const std::string whole = content_of(write_small(folder));
  const std::size_t num_token_bytes = 7;
  for (std::size_t i = 0; i < whole.size(); ++i) {
    if (i >= sizeof(TokenHeader) && i < sizeof(TokenHeader) + num_token_bytes) {
      continue;
    }
    std::string changed = whole;
    changed[i] = static_cast<char>(changed[i] ^ 0x10);
    const std::string path = folder.write("changed.tokens", changed);
    HS_EXPECT_HAS(open_fault(path), "changed.tokens: ");
  }
  std::string changed = whole;
  changed[20] = 1;
  HS_EXPECT_HAS(open_fault(folder.write("changed.tokens", changed)), "its header is damaged");
  changed = whole;
  changed.back() = 'X';
  HS_EXPECT_HAS(open_fault(folder.write("changed.tokens", changed)), "document table is damaged");
}

TEST(TokenFileTest, VerifyFindsChangedTokens) {
  const ScratchFolder folder;
  std::string content = content_of(write_small(folder));
  content[sizeof(TokenHeader) + 2] = 9;
  const TokenFile file(folder.write("changed.tokens", content));
  HS_EXPECT_HAS(thrown_text<IoError>([&] { file.verify(); }), "its tokens are damaged: SHA-256");
}

TEST(TokenFileTest, ReadingRefusesTokensOutsideTheVocabulary) {
  const ScratchFolder folder;
  std::string content = content_of(write_small(folder));
  content[sizeof(TokenHeader) + 2] = static_cast<char>(200);
  const TokenFile file(folder.write("changed.tokens", content));
  std::vector<std::int64_t> tokens(2);
  file.read(0, tokens);
  const std::string fault = thrown_text<IoError>([&] { file.read(1, tokens); });
  HS_EXPECT_HAS(fault, "changed.tokens: token 200 at position 2 is outside the vocabulary of 100");
}

// Files with right checksums but impossible contents: written by another program.
TEST(TokenFileTest, RefusesImpossibleHeaders) {
  const ScratchFolder folder;
  const std::string whole = content_of(write_small(folder));
  const auto fault = [&](auto change) {
    TokenHeader header = header_of(whole);
    change(header);
    return open_fault(folder.write("made.tokens", with_header(whole, header)));
  };
  HS_EXPECT_HAS(fault([](TokenHeader& h) { h.version = 7; }), "format version 7 (expected 1)");
  HS_EXPECT_HAS(fault([](TokenHeader& h) { h.num_tokens = 0; }), "holds no tokens");
  HS_EXPECT_HAS(fault([](TokenHeader& h) { h.token_bytes = 3; }), "tokens of 3 bytes");
  HS_EXPECT_HAS(fault([](TokenHeader& h) { h.vocab_size = 0; }), "a vocabulary of 0");
  HS_EXPECT_HAS(fault([](TokenHeader& h) { h.num_tokens = ~0ULL / 2; }), "where they do not fit");
  HS_EXPECT_HAS(fault([](TokenHeader& h) { h.tokens_offset = ~0ULL; }), "where they do not fit");
  HS_EXPECT_HAS(fault([](TokenHeader& h) { h.tokens_offset = 0; }), "where they do not fit");
  HS_EXPECT_HAS(fault([](TokenHeader& h) { h.table_offset = ~0ULL; }), "is truncated");
  HS_EXPECT_HAS(fault([](TokenHeader& h) { h.table_bytes = ~0ULL; }), "is truncated");
  HS_EXPECT_HAS(
      fault([](TokenHeader& h) { h.num_documents = 3; }), "table does not match its header"
  );
  HS_EXPECT_HAS(
      fault([](TokenHeader& h) { h.num_documents = 1; }), "table does not match its header"
  );
}

TEST(TokenFileTest, WriterRefusesForeignTokensAndWrongOrder) {
  const ScratchFolder folder;
  TokenFileWriter writer(
      folder / "x.tokens", {.tokenizer_name = "made", .vocab_size = 10, .separator = 9}
  );
  HS_EXPECT_HAS(
      thrown_text<InvalidArgument>([&] { writer.append(std::vector<Token>{1}); }),
      "outside a document"
  );
  EXPECT_THROW(writer.end_document(), InvalidArgument);
  HS_EXPECT_HAS(thrown_text<InvalidArgument>([&] { writer.finish(); }), "0 tokens in 0 documents");
  writer.begin_document("a", 1);
  EXPECT_THROW(writer.begin_document("b", 1), InvalidArgument);
  EXPECT_THROW(writer.finish(), InvalidArgument);
  HS_EXPECT_HAS(
      thrown_text<InvalidArgument>([&] { writer.append(std::vector<Token>{1, 10}); }),
      "token 10 at position 1 is outside the vocabulary of 10"
  );
  EXPECT_THROW(writer.append(std::vector<Token>{-1}), InvalidArgument);
  EXPECT_THROW(
      TokenFileWriter(
          folder / "y.tokens", {.tokenizer_name = "", .vocab_size = 0, .separator = {}}
      ),
      InvalidArgument
  );
  EXPECT_THROW(
      TokenFileWriter(folder / "y.tokens", {.tokenizer_name = "", .vocab_size = 5, .separator = 5}),
      InvalidArgument
  );
}

TEST(TokenFileTest, AnAbandonedWriterLeavesTheOldFileAndNothingElse) {
  const ScratchFolder folder;
  const std::string path = write_small(folder);
  const std::string before = content_of(path);
  {
    TokenFileWriter writer(path, {.tokenizer_name = "made", .vocab_size = 10, .separator = {}});
    writer.begin_document("a", 1);
    writer.append(std::vector<Token>(1000, 3));
  }
  EXPECT_EQ(content_of(path), before);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

TEST(TokenFileTest, AReplacedFileStaysReadableWhereItWasOpen) {
  const ScratchFolder folder;
  const TokenFile old(write_small(folder));
  TokenFileWriter writer(
      folder / "small.tokens", {.tokenizer_name = "made", .vocab_size = 10, .separator = {}}
  );
  writer.begin_document("a", 1);
  writer.append(std::vector<Token>(3, 7));
  writer.end_document();
  writer.finish();
  EXPECT_EQ(all_tokens(old).size(), 7u);
  old.verify();
  EXPECT_EQ(all_tokens(TokenFile(folder / "small.tokens")), (std::vector<std::int64_t>{7, 7, 7}));
}

TEST(TokenFileTest, WriterNamesTheFileWhenTheFolderIsMissing) {
  const ScratchFolder folder;
  HS_EXPECT_HAS(
      thrown_text<IoError>([&] {
        TokenFileWriter(
            folder / "none/x.tokens", {.tokenizer_name = "", .vocab_size = 5, .separator = {}}
        );
      }),
      "none/x.tokens: cannot be created after 0 bytes: No such file"
  );
}

// A limit on file sizes stands for a full disk: both stop a write midway.
TEST(TokenFileTest, WriterReportsAFullDisk) {
  const ScratchFolder folder;
  auto* const old_handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit old_limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  rlimit limit = old_limit;
  limit.rlim_cur = 100'000;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  const std::string fault = thrown_text<IoError>([&] {
    TokenFileWriter writer(
        folder / "big.tokens", {.tokenizer_name = "made", .vocab_size = 10, .separator = {}}
    );
    writer.begin_document("a", 1);
    writer.append(std::vector<Token>(200'000, 3));
  });
  ::setrlimit(RLIMIT_FSIZE, &old_limit);
  std::signal(SIGXFSZ, old_handler);
  HS_EXPECT_HAS(fault, "big.tokens: cannot be written after ");
  HS_EXPECT_HAS(fault, "free some space");
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

}  // namespace
}  // namespace hypershard::data
