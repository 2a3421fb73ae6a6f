// Why: adapts the SentencePiece library so that no byte of a text is lost and nothing is printed.
// The library alone turns invalid bytes into U+FFFD and U+2581 into a space.
#include "hypershard/data/sentencepiece_tokenizer.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <unordered_map>
#include <utility>

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include "hypershard/core/error.h"
#include "hypershard/data/internal/output_file.h"
#include "hypershard/data/internal/sha256.h"
#include "hypershard/data/internal/tokenizer_json.h"
#include "hypershard/data/internal/utf8.h"

namespace hypershard::data {
namespace {

// The library writes a space as this character, so it cannot tell one from the other in a text.
constexpr std::string_view kSpaceMark = "\xE2\x96\x81";

class SentencePieceTokenizer final : public Tokenizer {
 public:
  SentencePieceTokenizer(std::string model, const std::string& origin);

  std::vector<Token> encode(std::string_view text) const override;
  std::string decode(std::span<const Token> tokens) const override;
  std::int64_t vocab_size() const override { return processor_.GetPieceSize(); }
  std::string name() const override { return name_; }
  std::optional<Token> bos_id() const override { return id_if_any(processor_.bos_id()); }
  std::optional<Token> eos_id() const override { return id_if_any(processor_.eos_id()); }
  void save(const std::string& folder) const override;

 private:
  static std::optional<Token> id_if_any(int id) {
    return id < 0 ? std::nullopt : std::optional<Token>(id);
  }
  bool find_byte_ids();
  void find_texts();
  bool is_identity_on(std::string_view text) const;
  void append_library_ids(std::string_view text, std::vector<Token>& tokens) const;

  sentencepiece::SentencePieceProcessor processor_;
  std::string model_;
  std::string name_;
  std::array<Token, 256> byte_ids_{};
  // What each id stands for when the model is lossless; then decoding is concatenation.
  std::vector<std::string> texts_;
  bool lossless_ = false;
};

SentencePieceTokenizer::SentencePieceTokenizer(std::string model, const std::string& origin)
    : model_(std::move(model)) {
  const auto status = processor_.LoadFromSerializedProto(model_);
  if (model_.empty() || !status.ok()) {
    HS_FAIL(
        IoError,
        "data: ",
        origin,
        ": is not a SentencePiece model (",
        model_.size(),
        " bytes): ",
        status.ToString()
    );
  }
  name_ = "sentencepiece-" + std::to_string(processor_.GetPieceSize()) + "-" +
          internal::sha256_hex(model_).substr(0, 8);
  if (find_byte_ids()) {
    find_texts();
    // Spaces in front, between and behind, a ligature, a full-width letter, decomposed and composed
    // accents, case, a tab: what normalisers change.
    lossless_ = is_identity_on("  A  b\tc ") && is_identity_on("\n\n x") &&
                is_identity_on("\xEF\xAC\x81 \xEF\xBC\xA1 e\xCC\x81 \xC3\xA9 \xE3\x80\x80 Z");
  }
}

bool SentencePieceTokenizer::find_byte_ids() {
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  for (std::size_t byte = 0; byte < byte_ids_.size(); ++byte) {
    const std::string piece = {'<', '0', 'x', kDigits[byte >> 4], kDigits[byte & 15], '>'};
    byte_ids_[byte] = processor_.PieceToId(piece);
    if (!processor_.IsByte(byte_ids_[byte])) {
      return false;
    }
  }
  return true;
}

void SentencePieceTokenizer::find_texts() {
  texts_.resize(static_cast<std::size_t>(processor_.GetPieceSize()));
  for (std::size_t id = 0; id < texts_.size(); ++id) {
    const int piece_id = static_cast<int>(id);
    if (processor_.IsControl(piece_id) || processor_.IsUnused(piece_id) ||
        processor_.IsUnknown(piece_id) || processor_.IsByte(piece_id)) {
      continue;
    }
    std::string text = processor_.IdToPiece(piece_id);
    for (std::size_t at = text.find(kSpaceMark); at != std::string::npos;
         at = text.find(kSpaceMark, at)) {
      text.replace(at, kSpaceMark.size(), " ");
      ++at;
    }
    texts_[id] = std::move(text);
  }
  for (std::size_t byte = 0; byte < byte_ids_.size(); ++byte) {
    texts_[static_cast<std::size_t>(byte_ids_[byte])] = std::string(1, static_cast<char>(byte));
  }
}

bool SentencePieceTokenizer::is_identity_on(std::string_view text) const {
  std::vector<Token> tokens;
  append_library_ids(text, tokens);
  std::string decoded;
  for (const Token token : tokens) {
    decoded += texts_[static_cast<std::size_t>(token)];
  }
  return decoded == text;
}

void SentencePieceTokenizer::append_library_ids(std::string_view text, std::vector<Token>& tokens)
    const {
  if (text.empty()) {
    return;
  }
  std::vector<int> ids;
  const auto status = processor_.Encode(absl::string_view(text.data(), text.size()), &ids);
  HS_ASSERT(status.ok(), name_, ": cannot encode ", text.size(), " bytes: ", status.ToString());
  tokens.insert(tokens.end(), ids.begin(), ids.end());
}

std::vector<Token> SentencePieceTokenizer::encode(std::string_view text) const {
  std::vector<Token> tokens;
  tokens.reserve(text.size() / 3 + 8);
  if (!lossless_) {
    append_library_ids(text, tokens);
    return tokens;
  }
  std::size_t begin = 0;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = internal::utf8_sequence_length(text, at);
    const bool is_mark = length == kSpaceMark.size() && text.substr(at, length) == kSpaceMark;
    if (length > 0 && !is_mark) {
      at += length;
      continue;
    }
    append_library_ids(text.substr(begin, at - begin), tokens);
    for (begin = at + std::max<std::size_t>(length, 1); at < begin; ++at) {
      tokens.push_back(byte_ids_[static_cast<unsigned char>(text[at])]);
    }
  }
  append_library_ids(text.substr(begin), tokens);
  return tokens;
}

std::string SentencePieceTokenizer::decode(std::span<const Token> tokens) const {
  std::string text;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    internal::check_token(*this, tokens[i], i);
    if (lossless_) {
      text += texts_[static_cast<std::size_t>(tokens[i])];
    }
  }
  if (!lossless_) {
    const auto status = processor_.Decode(std::vector<int>(tokens.begin(), tokens.end()), &text);
    HS_ASSERT(status.ok(), name_, ": cannot decode ", tokens.size(), " ids: ", status.ToString());
  }
  return text;
}

void SentencePieceTokenizer::save(const std::string& folder) const {
  const auto model_path = std::filesystem::path(folder) / internal::kTokenizerModelFile;
  internal::write_file(model_path.string(), model_);
  internal::save_tokenizer_json(*this, "sentencepiece", internal::kTokenizerModelFile, folder);
}

// Feeds the trainer line by line; it skips "sentences" beyond its limit, so long lines are cut.
class LineIterator final : public sentencepiece::SentenceIterator {
 public:
  explicit LineIterator(const NextText& next_text) : next_text_(next_text) { Next(); }

  bool done() const override { return done_; }
  void Next() override {
    line_.clear();
    while (line_.empty() && !done_) {
      advance();
    }
  }
  const std::string& value() const override { return line_; }
  sentencepiece::util::Status status() const override { return {}; }

  static constexpr std::size_t kMaxLineBytes = 4000;

 private:
  void advance() {
    if (offset_ >= text_.size()) {
      text_.clear();
      offset_ = 0;
      done_ = !next_text_(text_);
      return;
    }
    const std::size_t end = std::min(text_.find('\n', offset_), text_.size());
    const std::string_view rest = std::string_view(text_).substr(offset_, end - offset_);
    line_ = internal::utf8_prefix(rest, kMaxLineBytes);
    if (line_.empty() && !rest.empty()) {
      line_ = rest.substr(0, kMaxLineBytes);  // not UTF-8: any cut is as good
    }
    offset_ += line_.size() + (line_.size() == rest.size() ? 1 : 0);
    std::erase(line_, '\0');
  }

  const NextText& next_text_;
  std::string text_;
  std::size_t offset_ = 0;
  std::string line_;
  bool done_ = false;
};

}  // namespace

bool has_sentencepiece() {
  return true;
}

std::unique_ptr<Tokenizer> load_sentencepiece(const std::string& path) {
  return parse_sentencepiece(internal::read_file(path), path);
}

std::unique_ptr<Tokenizer> parse_sentencepiece(std::string model, const std::string& origin) {
  return std::make_unique<SentencePieceTokenizer>(std::move(model), origin);
}

std::string train_sentencepiece(const NextText& next_text, std::int64_t vocab_size) {
  constexpr std::int64_t kNumReserved = 258;  // the bytes, <unk> and </s>
  HS_CHECK_GT(
      vocab_size,
      kNumReserved,
      "data: vocab_size ",
      vocab_size,
      " leaves no room for pieces: 256 bytes and 2 marks come first",
      HS_HINT("for text of a few MB, 1024 to 8192 work well")
  );
  const std::unordered_map<std::string, std::string> settings{
      {"model_type", "bpe"},
      {"vocab_size", std::to_string(vocab_size)},
      {"byte_fallback", "true"},
      {"normalization_rule_name", "identity"},
      {"remove_extra_whitespaces", "false"},
      {"add_dummy_prefix", "false"},
      {"allow_whitespace_only_pieces", "true"},
      {"max_sentence_length", std::to_string(LineIterator::kMaxLineBytes + 8)},
      {"unk_id", "0"},
      {"eos_id", "1"},
      {"bos_id", "-1"},
      {"pad_id", "-1"},
      {"num_threads", "1"},
      {"minloglevel", "2"},
  };
  LineIterator lines(next_text);
  HS_CHECK(!lines.done(), "data: no text to train a vocabulary of ", vocab_size, " on");
  std::string model;
  const auto status = sentencepiece::SentencePieceTrainer::Train(settings, &lines, &model);
  HS_CHECK(
      status.ok(),
      "data: a vocabulary of ",
      vocab_size,
      " cannot be trained on this text: ",
      status.ToString(),
      HS_HINT("the text's characters must fit, and its words must suffice: try another vocab_size")
  );
  return model;
}

void train_sentencepiece(
    const std::vector<std::string>& paths, const std::string& out_prefix, std::int64_t vocab_size
) {
  std::size_t next_path = 0;
  const NextText next_text = [&](std::string& text) {
    if (next_path == paths.size()) {
      return false;
    }
    text = internal::read_file(paths[next_path++]);
    return true;
  };
  internal::write_file(out_prefix + ".model", train_sentencepiece(next_text, vocab_size));
}

}  // namespace hypershard::data
