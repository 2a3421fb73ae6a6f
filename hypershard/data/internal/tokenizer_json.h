// Why: every tokenizer describes itself in the same file and refuses foreign ids in the same words.
// Shared by the tokenizers only.
#pragma once

#include <cstddef>
#include <string>

#include "hypershard/data/tokenizer.h"

namespace hypershard::data::internal {

inline constexpr const char* kTokenizerFile = "tokenizer.json";
inline constexpr const char* kTokenizerModelFile = "tokenizer.model";

/// Throws InvalidArgument if `token` is not an id of `tokenizer`.
void check_token(const Tokenizer& tokenizer, Token token, std::size_t position);

/// Writes the description of `tokenizer` into `folder`; `model_file` is empty if there is no model.
void save_tokenizer_json(
    const Tokenizer& tokenizer,
    const std::string& type,
    const std::string& model_file,
    const std::string& folder
);

}  // namespace hypershard::data::internal
