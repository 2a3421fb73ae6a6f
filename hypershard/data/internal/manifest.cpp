// Why: the manifest's JSON form, in one place for reading and writing.
// Keys keep their order, so that the same preparation gives the same bytes.
#include "hypershard/data/internal/manifest.h"

#include <algorithm>
#include <exception>

#include <nlohmann/json.hpp>

#include "hypershard/core/error.h"

namespace hypershard::data::internal {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFormat = "hypershard.data";
constexpr int kVersion = 1;

const char* name_of(TextEncoding encoding) {
  switch (encoding) {
    case TextEncoding::kUtf8:
      return "utf-8";
    case TextEncoding::kLatin1:
      return "latin-1";
    case TextEncoding::kAuto:
      break;
  }
  return "auto";
}

Json token_file_json(const ManifestFile& file, const std::vector<ManifestDocument>& documents) {
  if (file.file.empty()) {
    return nullptr;
  }
  const auto num_documents =
      std::count_if(documents.begin(), documents.end(), [&](const ManifestDocument& document) {
        return document.split + ".tokens" == file.file;
      });
  return {
      {"file", file.file},
      {"documents", num_documents},
      {"tokens", file.num_tokens},
      {"text_bytes", file.text_bytes},
      {"tokens_sha256", file.sha256}
  };
}

ManifestFile token_file_from(const Json& json) {
  if (json.is_null()) {
    return {};
  }
  return {
      .file = json.at("file"),
      .num_tokens = json.at("tokens"),
      .text_bytes = json.at("text_bytes"),
      .sha256 = json.at("tokens_sha256")
  };
}

Json document_json(const ManifestDocument& document) {
  return {
      {"name", document.name},
      {"title", document.title},
      {"split", document.split},
      {"source", document.source},
      {"encoding", document.encoding},
      {"source_bytes", document.source_bytes},
      {"source_sha256", document.sha256},
      {"stripped_bytes", document.stripped_bytes},
      {"text_bytes", document.text_bytes},
      {"tokens", document.num_tokens}
  };
}

ManifestDocument document_from(const Json& json) {
  return {
      .name = json.at("name"),
      .title = json.at("title"),
      .source = json.at("source"),
      .split = json.at("split"),
      .encoding = json.at("encoding"),
      .sha256 = json.at("source_sha256"),
      .source_bytes = json.at("source_bytes"),
      .stripped_bytes = json.at("stripped_bytes"),
      .text_bytes = json.at("text_bytes"),
      .num_tokens = json.at("tokens")
  };
}

Manifest manifest_from(const Json& json) {
  Manifest manifest;
  manifest.options = json.at("options").dump();
  const Json& tokenizer = json.at("tokenizer");
  manifest.tokenizer_name = tokenizer.at("name");
  manifest.vocab_size = tokenizer.at("vocab_size");
  for (const Json& file : tokenizer.at("files")) {
    manifest.tokenizer_files.push_back({.file = file.at("file"), .sha256 = file.at("sha256")});
  }
  manifest.train = token_file_from(json.at("splits").at("train"));
  manifest.val = token_file_from(json.at("splits").at("val"));
  for (const Json& document : json.at("documents")) {
    manifest.documents.push_back(document_from(document));
  }
  return manifest;
}

}  // namespace

std::string describe_options(const PrepareOptions& options) {
  const bool is_trained = options.tokenizer == TokenizerKind::kSentencePiece;
  Json json;
  json["tokenizer"] = is_trained ? "sentencepiece" : "byte";
  if (is_trained) {
    json["vocab_size"] = options.vocab_size;
  }
  json["encoding"] = name_of(options.encoding);
  json["strip_gutenberg"] = options.strip_gutenberg;
  json["include"] = options.include;
  json["holdout"] = options.holdout;
  if (options.holdout.empty()) {
    json["holdout_fraction"] = options.holdout_fraction;
    json["seed"] = options.seed;
  }
  return json.dump();
}

std::string write_manifest(const Manifest& manifest) {
  Json json;
  json["format"] = kFormat;
  json["version"] = kVersion;
  json["options"] = Json::parse(manifest.options);
  Json files = Json::array();
  for (const ManifestFile& file : manifest.tokenizer_files) {
    files.push_back({{"file", file.file}, {"sha256", file.sha256}});
  }
  json["tokenizer"] = {
      {"name", manifest.tokenizer_name}, {"vocab_size", manifest.vocab_size}, {"files", files}
  };
  json["splits"] = {
      {"train", token_file_json(manifest.train, manifest.documents)},
      {"val", token_file_json(manifest.val, manifest.documents)}
  };
  json["documents"] = Json::array();
  for (const ManifestDocument& document : manifest.documents) {
    json["documents"].push_back(document_json(document));
  }
  return json.dump(2) + "\n";
}

std::optional<Manifest> parse_manifest(const std::string& text) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || json.value("format", Json()) != kFormat ||
      json.value("version", Json()) != kVersion) {
    return std::nullopt;
  }
  try {
    return manifest_from(json);
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;  // a key is missing or has another type: not a manifest of this version
  }
}

bool same_inputs(const Manifest& a, const Manifest& b) {
  const auto is_same = [](const ManifestDocument& x, const ManifestDocument& y) {
    return x.name == y.name && x.source == y.source && x.split == y.split && x.sha256 == y.sha256;
  };
  return a.options == b.options &&
         std::equal(
             a.documents.begin(), a.documents.end(), b.documents.begin(), b.documents.end(), is_same
         );
}

}  // namespace hypershard::data::internal
