// Why: a corpus is tokenised once, then read by all ranks at once straight from the page cache.
// The file describes itself, so that a wrong, torn or foreign one is refused before training.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "hypershard/data/tokenizer.h"

namespace hypershard::data {

/// One document of a token file: the half-open range of its tokens, without its separator.
struct TokenDocument {
  std::string name;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint64_t text_bytes = 0;  ///< size of the text that was tokenised
};

/// What a token file says about itself.
struct TokenFileInfo {
  std::string tokenizer_name;
  std::int64_t vocab_size = 0;
  std::uint64_t num_tokens = 0;    ///< separators included
  int token_bytes = 0;             ///< 1, 2 or 4
  std::optional<Token> separator;  ///< the token behind every document, if any
  std::string tokens_sha256;       ///< of the stored tokens, hexadecimal
  std::uint64_t text_bytes = 0;    ///< sum over documents
};

/// How a token file will be read; the kernel is told.
enum class AccessPattern { kRandom, kSequential };

/// A token file mapped into memory, read only.
///
/// Pages are shared by all processes that map the file. Opening reads the header and the documents
/// only; verify() reads all. The file must not be truncated while it is open (writers never do:
/// they replace it as a whole).
/// Threads: const functions may be called from any thread.
class TokenFile {
 public:
  /// Opens `path` and checks its header and document table.
  /// Errors: IoError naming the file, what was found and what was expected, if it cannot be read,
  ///         is not a token file, is of another version, damaged, truncated, or holds no tokens.
  explicit TokenFile(const std::string& path, AccessPattern pattern = AccessPattern::kRandom);
  ~TokenFile();
  TokenFile(TokenFile&& other) noexcept;
  TokenFile& operator=(TokenFile&& other) noexcept;

  const std::string& path() const;
  const TokenFileInfo& info() const;
  const std::vector<TokenDocument>& documents() const;
  std::uint64_t num_tokens() const { return info().num_tokens; }
  std::int64_t vocab_size() const { return info().vocab_size; }

  /// Copies tokens [begin, begin + destination.size()) and checks each against the vocabulary.
  /// Errors: InvalidArgument if the range leaves the file; IoError for a token that is not in the
  ///         vocabulary, naming its position.
  void read(std::uint64_t begin, std::span<std::int64_t> destination) const;
  /// Asks the kernel to bring tokens [begin, begin + count) into memory; returns at once.
  void will_need(std::uint64_t begin, std::uint64_t count) const;
  /// Reads the whole file and compares it with the digest taken when it was written.
  /// Errors: IoError if they differ, or as read().
  void verify() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// What a new token file will say about its tokens.
struct TokenWriterOptions {
  std::string tokenizer_name;
  std::int64_t vocab_size = 0;
  std::optional<Token> separator = {};  ///< written behind every document, if any
};

/// Makes the writer's options from a tokenizer; documents are separated by its end-of-text id.
TokenWriterOptions token_writer_options(const Tokenizer& tokenizer);

/// Writes a token file piece by piece, in the smallest type that holds the vocabulary.
///
/// Nothing is visible at `path` before finish(); a writer destroyed without it leaves nothing.
/// Use: begin_document, append (any number of times), end_document, ..., finish.
/// Errors: IoError if the disk is full or the folder not writable; InvalidArgument for a token
///         outside the vocabulary, a wrong order of calls, or finish() without a token.
class TokenFileWriter {
 public:
  TokenFileWriter(const std::string& path, TokenWriterOptions options);
  ~TokenFileWriter();
  TokenFileWriter(TokenFileWriter&& other) noexcept;
  TokenFileWriter& operator=(TokenFileWriter&& other) noexcept;

  /// Opens the next document; `text_bytes` is the size of its text.
  void begin_document(const std::string& name, std::uint64_t text_bytes);
  /// Adds tokens to the open document.
  void append(std::span<const Token> tokens);
  /// Closes the open document and puts the separator behind it.
  void end_document();
  /// Makes the file durable and visible, and returns what it says about itself.
  TokenFileInfo finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace hypershard::data
