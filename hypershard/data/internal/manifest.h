// Why: the manifest is what makes a prepared folder explain itself and lets a second run do
// nothing. It is written last, so that a folder with a manifest is whole.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "hypershard/data/prepare.h"

namespace hypershard::data::internal {

inline constexpr const char* kManifestFile = "manifest.json";

/// One document as the manifest records it.
struct ManifestDocument {
  std::string name;
  std::string title;
  std::string source;
  std::string split;  ///< `train` or `val`
  std::string encoding;
  std::string sha256;
  std::uint64_t source_bytes = 0;
  std::uint64_t stripped_bytes = 0;
  std::uint64_t text_bytes = 0;
  std::uint64_t num_tokens = 0;
};

/// One file of the folder.
struct ManifestFile {
  std::string file;  ///< name in the folder; empty if there is no such file
  std::uint64_t num_tokens = 0;
  std::uint64_t text_bytes = 0;
  std::string sha256;  ///< of the stored tokens, or of the whole tokenizer file
};

/// The content of `manifest.json`.
struct Manifest {
  std::string options;  ///< JSON text of everything that decides the result besides the documents
  std::string tokenizer_name;
  std::int64_t vocab_size = 0;
  std::vector<ManifestFile> tokenizer_files;
  ManifestFile train;
  ManifestFile val;
  std::vector<ManifestDocument> documents;
};

/// Writes the options that decide the result, in a fixed order.
std::string describe_options(const PrepareOptions& options);

/// Writes the manifest as JSON text.
std::string write_manifest(const Manifest& manifest);

/// Reads JSON text; nothing if it is not a manifest of this version.
std::optional<Manifest> parse_manifest(const std::string& text);

/// Tells whether two manifests come from the same documents and options.
bool same_inputs(const Manifest& a, const Manifest& b);

}  // namespace hypershard::data::internal
