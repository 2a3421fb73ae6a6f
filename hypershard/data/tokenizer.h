// Why: everything between text and token ids goes through one interface, whatever the vocabulary.
// A prepared folder names its tokenizer, so that training and sampling use the same one.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace hypershard::data {

using Token = std::int32_t;

/// Turns text into token ids and back.
///
/// Ids lie in [0, vocab_size). encode never adds begin or end tokens: the caller places them.
/// Threads: const functions may be called from any thread.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  /// Turns `text` into ids; empty text gives none. Bytes that are not UTF-8 are kept where the
  /// vocabulary can express them, see the concrete tokenizer.
  virtual std::vector<Token> encode(std::string_view text) const = 0;
  /// Turns ids into text. A run of ids may end inside a character: the result is bytes.
  /// Errors: InvalidArgument for an id outside the vocabulary, naming its position.
  virtual std::string decode(std::span<const Token> tokens) const = 0;
  /// Returns the number of ids.
  virtual std::int64_t vocab_size() const = 0;
  /// Names the vocabulary: equal names mean equal ids, e.g. `byte` or
  /// `sentencepiece-4096-1f0c22d9`.
  virtual std::string name() const = 0;
  /// Returns the id that begins a text, if the vocabulary has one.
  virtual std::optional<Token> bos_id() const = 0;
  /// Returns the id that ends a document, if the vocabulary has one. Token files put it between
  /// documents; a sampler may stop at it.
  virtual std::optional<Token> eos_id() const = 0;
  /// Writes `tokenizer.json`, and `tokenizer.model` where there is a model, into the folder.
  /// Errors: IoError.
  virtual void save(const std::string& folder) const = 0;
};

/// Every byte is a token: 256 ids, nothing to learn, every byte string round-trips.
///
/// Byte 0, which text never contains, ends a document; decode keeps it.
class ByteTokenizer final : public Tokenizer {
 public:
  std::vector<Token> encode(std::string_view text) const override;
  std::string decode(std::span<const Token> tokens) const override;
  std::int64_t vocab_size() const override { return 256; }
  std::string name() const override { return "byte"; }
  std::optional<Token> bos_id() const override { return std::nullopt; }
  std::optional<Token> eos_id() const override { return 0; }
  void save(const std::string& folder) const override;
};

/// Loads a tokenizer from a prepared folder, a `tokenizer.json`, or a SentencePiece `.model`.
/// Errors: IoError if the file is missing or damaged; Unsupported for a `.model` in a build without
///         SentencePiece or a kind this version does not know.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& path);

}  // namespace hypershard::data
