// Why: the byte vocabulary, and the file that tells which tokenizer a folder was prepared with.
// The file is JSON so that other programs can read it; the kinds live in their own sources.
#include "hypershard/data/tokenizer.h"

#include <filesystem>

#include <nlohmann/json.hpp>

#include "hypershard/core/error.h"
#include "hypershard/data/internal/output_file.h"
#include "hypershard/data/internal/tokenizer_json.h"
#include "hypershard/data/sentencepiece_tokenizer.h"

namespace hypershard::data {
namespace fs = std::filesystem;

std::vector<Token> ByteTokenizer::encode(std::string_view text) const {
  std::vector<Token> tokens;
  tokens.reserve(text.size());
  for (const char character : text) {
    tokens.push_back(static_cast<unsigned char>(character));
  }
  return tokens;
}

std::string ByteTokenizer::decode(std::span<const Token> tokens) const {
  std::string text;
  text.reserve(tokens.size());
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    internal::check_token(*this, tokens[i], i);
    text += static_cast<char>(tokens[i]);
  }
  return text;
}

void ByteTokenizer::save(const std::string& folder) const {
  internal::save_tokenizer_json(*this, "byte", "", folder);
}

namespace internal {

void check_token(const Tokenizer& tokenizer, Token token, std::size_t position) {
  HS_CHECK(
      token >= 0 && token < tokenizer.vocab_size(),
      "tokenizer ",
      tokenizer.name(),
      ": token ",
      token,
      " at position ",
      position,
      " is outside the vocabulary (expected 0 to ",
      tokenizer.vocab_size() - 1,
      ")",
      HS_HINT("was the text encoded by another tokenizer?")
  );
}

void save_tokenizer_json(
    const Tokenizer& tokenizer,
    const std::string& type,
    const std::string& model_file,
    const std::string& folder
) {
  nlohmann::ordered_json json;
  json["format"] = "hypershard.tokenizer";
  json["version"] = 1;
  json["type"] = type;
  json["name"] = tokenizer.name();
  json["vocab_size"] = tokenizer.vocab_size();
  const auto id_or_null = [](std::optional<Token> id) {
    return id ? nlohmann::ordered_json(*id) : nlohmann::ordered_json(nullptr);
  };
  json["bos_id"] = id_or_null(tokenizer.bos_id());
  json["eos_id"] = id_or_null(tokenizer.eos_id());
  if (!model_file.empty()) {
    json["model_file"] = model_file;
  }
  write_file((fs::path(folder) / kTokenizerFile).string(), json.dump(2) + "\n");
}

}  // namespace internal

namespace {

// Returns a text field, or nothing if it is absent or no text.
std::string field(const nlohmann::json& json, const char* key) {
  const auto at = json.find(key);
  return at != json.end() && at->is_string() ? at->get<std::string>() : std::string();
}

std::unique_ptr<Tokenizer> load_described(const std::string& path) {
  const std::string text = internal::read_file(path);
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || field(json, "format") != "hypershard.tokenizer") {
    HS_FAIL(
        IoError,
        "data: ",
        path,
        ": is not a tokenizer description (expected JSON with format 'hypershard.tokenizer')",
        HS_HINT("prepare the folder again with `hypershard data text`")
    );
  }
  const std::string type = field(json, "type");
  const std::string name = field(json, "name");
  std::unique_ptr<Tokenizer> tokenizer;
  if (type == "byte") {
    tokenizer = std::make_unique<ByteTokenizer>();
  } else if (type == "sentencepiece") {
    const fs::path model = fs::path(path).parent_path() / field(json, "model_file");
    tokenizer = load_sentencepiece(model.string());
  } else {
    HS_FAIL(
        Unsupported,
        "data: ",
        path,
        ": unknown tokenizer type '",
        type,
        "' (this version knows byte and sentencepiece)"
    );
  }
  if (tokenizer->name() != name) {
    HS_FAIL(
        IoError,
        "data: ",
        path,
        ": describes tokenizer '",
        name,
        "' but its files hold '",
        tokenizer->name(),
        "'",
        HS_HINT("the folder mixes two preparations; prepare it again")
    );
  }
  return tokenizer;
}

}  // namespace

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& path) {
  const fs::path place(path);
  if (fs::is_directory(place)) {
    return load_described((place / internal::kTokenizerFile).string());
  }
  return place.extension() == ".json" ? load_described(path) : load_sentencepiece(path);
}

}  // namespace hypershard::data
