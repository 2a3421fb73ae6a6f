// Why: sub-word vocabularies for larger runs, through the SentencePiece library.
// The library stays behind this header; a build without it links a source that says so.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "hypershard/data/tokenizer.h"

namespace hypershard::data {

/// Tells whether this build can load and train SentencePiece models (CMake: HS_WITH_SENTENCEPIECE).
bool has_sentencepiece();

/// Loads a SentencePiece model file.
///
/// A model trained here keeps every byte: white space is not normalised, and bytes without a
/// piece of their own, also those that are not UTF-8, become byte tokens. A model trained elsewhere
/// keeps its own normalisation (often: a space in front, NFKC, U+FFFD for invalid bytes), so that
/// its round trip may change text.
/// Errors: IoError if the file cannot be read or is not a model; Unsupported in a build without
///         the library.
std::unique_ptr<Tokenizer> load_sentencepiece(const std::string& path);

/// As load_sentencepiece, from the content of a model file; `origin` names it in errors.
std::unique_ptr<Tokenizer> parse_sentencepiece(std::string model, const std::string& origin);

/// Gives the next text to train on, or false at the end.
using NextText = std::function<bool(std::string&)>;

/// Trains a BPE vocabulary with byte fallback and returns the content of its model file.
///
/// Same texts and size give the same bytes; no path enters the model. Document separator: `</s>`.
/// Errors: InvalidArgument if `vocab_size` is too small for the alphabet or too large for the
///         texts; Unsupported in a build without the library.
std::string train_sentencepiece(const NextText& next_text, std::int64_t vocab_size);

/// Trains on the text files `paths` and writes `out_prefix`.model.
void train_sentencepiece(
    const std::vector<std::string>& paths, const std::string& out_prefix, std::int64_t vocab_size
);

}  // namespace hypershard::data
