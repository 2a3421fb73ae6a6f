// Why: writing of token files; the reader is in token_file.cpp.
// Tokens are narrowed through a small buffer, so memory does not grow with the corpus.
#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "hypershard/core/error.h"
#include "hypershard/data/internal/output_file.h"
#include "hypershard/data/internal/token_format.h"
#include "hypershard/data/token_file.h"

namespace hypershard::data {
namespace {

using internal::TokenHeader;

std::uint32_t token_bytes_for(std::int64_t vocab_size) {
  if (vocab_size <= 1 << 8) {
    return 1;
  }
  return vocab_size <= 1 << 16 ? 2 : 4;
}

template <class Number>
void append_number(std::string& bytes, Number number) {
  char raw[sizeof(Number)];
  std::memcpy(raw, &number, sizeof(Number));
  bytes.append(raw, sizeof(Number));
}

void append_text(std::string& bytes, const std::string& text) {
  append_number(bytes, static_cast<std::uint32_t>(text.size()));
  bytes += text;
}

template <class Stored>
void narrow(std::span<const Token> tokens, std::string& bytes) {
  bytes.resize(tokens.size() * sizeof(Stored));
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const auto stored = static_cast<Stored>(tokens[i]);
    std::memcpy(bytes.data() + i * sizeof(Stored), &stored, sizeof(Stored));
  }
}

}  // namespace

struct TokenFileWriter::Impl {
  Impl(const std::string& path, TokenWriterOptions writer_options);
  void store(std::span<const Token> tokens);
  std::string table() const;

  TokenWriterOptions options;
  internal::OutputFile file;
  TokenHeader header;
  internal::Sha256 hash;
  std::vector<TokenDocument> documents;
  bool is_open = false;
  bool is_finished = false;
  std::string buffer;
};

TokenFileWriter::Impl::Impl(const std::string& path, TokenWriterOptions writer_options)
    : options(std::move(writer_options)), file(path) {
  HS_CHECK(
      options.vocab_size > 0 && options.vocab_size <= std::numeric_limits<Token>::max(),
      "data: ",
      path,
      ": vocab_size is ",
      options.vocab_size,
      " (expected 1 to ",
      std::numeric_limits<Token>::max(),
      ")"
  );
  HS_CHECK(
      !options.separator || (*options.separator >= 0 && *options.separator < options.vocab_size),
      "data: ",
      path,
      ": separator ",
      options.separator,
      " is outside the vocabulary of ",
      options.vocab_size
  );
  header.token_bytes = token_bytes_for(options.vocab_size);
  header.vocab_size = static_cast<std::uint64_t>(options.vocab_size);
  header.tokens_offset = sizeof(TokenHeader);
  file.write(&header, sizeof(header));
}

void TokenFileWriter::Impl::store(std::span<const Token> tokens) {
  constexpr std::size_t kPiece = std::size_t{1} << 16;
  for (std::size_t begin = 0; begin < tokens.size(); begin += kPiece) {
    const auto piece = tokens.subspan(begin, std::min(kPiece, tokens.size() - begin));
    for (std::size_t i = 0; i < piece.size(); ++i) {
      HS_CHECK(
          piece[i] >= 0 && piece[i] < options.vocab_size,
          "data: ",
          file.path(),
          ": token ",
          piece[i],
          " at position ",
          header.num_tokens + i,
          " is outside the vocabulary of ",
          options.vocab_size
      );
    }
    switch (header.token_bytes) {
      case 1:
        narrow<std::uint8_t>(piece, buffer);
        break;
      case 2:
        narrow<std::uint16_t>(piece, buffer);
        break;
      default:
        narrow<std::uint32_t>(piece, buffer);
        break;
    }
    hash.update(buffer);
    file.write(buffer);
    header.num_tokens += piece.size();
  }
}

std::string TokenFileWriter::Impl::table() const {
  std::string bytes;
  append_text(bytes, options.tokenizer_name);
  append_number(bytes, std::int64_t{options.separator.value_or(-1)});
  for (const TokenDocument& document : documents) {
    append_number(bytes, document.begin);
    append_number(bytes, document.end);
    append_number(bytes, document.text_bytes);
    append_text(bytes, document.name);
  }
  return bytes;
}

TokenWriterOptions token_writer_options(const Tokenizer& tokenizer) {
  return {
      .tokenizer_name = tokenizer.name(),
      .vocab_size = tokenizer.vocab_size(),
      .separator = tokenizer.eos_id()
  };
}

TokenFileWriter::TokenFileWriter(const std::string& path, TokenWriterOptions options)
    : impl_(std::make_unique<Impl>(path, std::move(options))) {}
TokenFileWriter::~TokenFileWriter() = default;
TokenFileWriter::TokenFileWriter(TokenFileWriter&& other) noexcept = default;
TokenFileWriter& TokenFileWriter::operator=(TokenFileWriter&& other) noexcept = default;

void TokenFileWriter::begin_document(const std::string& name, std::uint64_t text_bytes) {
  HS_CHECK(
      !impl_->is_open && !impl_->is_finished,
      "data: ",
      impl_->file.path(),
      ": document '",
      name,
      "' begins before the last one ended or after finish"
  );
  const std::uint64_t begin = impl_->header.num_tokens;
  impl_->documents.push_back({.name = name, .begin = begin, .end = begin, .text_bytes = text_bytes}
  );
  impl_->is_open = true;
}

void TokenFileWriter::append(std::span<const Token> tokens) {
  HS_CHECK(
      impl_->is_open,
      "data: ",
      impl_->file.path(),
      ": ",
      tokens.size(),
      " tokens arrive outside a document",
      HS_HINT("call begin_document first")
  );
  impl_->store(tokens);
}

void TokenFileWriter::end_document() {
  HS_CHECK(
      impl_->is_open,
      "data: ",
      impl_->file.path(),
      ": no document is open after ",
      impl_->documents.size(),
      " documents"
  );
  impl_->documents.back().end = impl_->header.num_tokens;
  impl_->is_open = false;
  if (impl_->options.separator) {
    impl_->store({&*impl_->options.separator, 1});
  }
}

TokenFileInfo TokenFileWriter::finish() {
  HS_CHECK(
      !impl_->is_open && !impl_->is_finished,
      "data: ",
      impl_->file.path(),
      ": finish comes twice or before the end of document ",
      impl_->documents.size()
  );
  TokenHeader& header = impl_->header;
  HS_CHECK(
      header.num_tokens > 0,
      "data: ",
      impl_->file.path(),
      ": nothing to write: 0 tokens in ",
      impl_->documents.size(),
      " documents"
  );
  const std::string table = impl_->table();
  header.table_offset = impl_->file.size_bytes();
  header.table_bytes = table.size();
  header.table_checksum = internal::first_word(internal::sha256(table.data(), table.size()));
  header.tokens_sha256 = impl_->hash.finish();
  header.num_documents = impl_->documents.size();
  header.header_checksum = checksum_of(header);
  impl_->file.write(table);
  impl_->file.overwrite(0, &header, sizeof(header));
  impl_->file.commit();
  impl_->is_finished = true;

  TokenFileInfo info{
      .tokenizer_name = impl_->options.tokenizer_name,
      .vocab_size = impl_->options.vocab_size,
      .num_tokens = header.num_tokens,
      .token_bytes = static_cast<int>(header.token_bytes),
      .separator = impl_->options.separator,
      .tokens_sha256 = internal::to_hex(header.tokens_sha256)
  };
  for (const TokenDocument& document : impl_->documents) {
    info.text_bytes += document.text_bytes;
  }
  return info;
}

}  // namespace hypershard::data
