// Why: text arrives in unknown encodings, and a tokenizer must not lose bytes it cannot read.
// Well-formedness here is the one every other place relies on.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace hypershard::data::internal {

/// Returns the length of the well-formed UTF-8 sequence at `text[offset]`, or 0 if there is none.
/// Source: Unicode 15, table 3-7: no overlong forms, no surrogates, nothing above U+10FFFF.
std::size_t utf8_sequence_length(std::string_view text, std::size_t offset);

/// What a piece of text looks like as UTF-8.
struct Utf8Scan {
  bool valid = true;
  std::size_t first_invalid = 0;  ///< offset of the first byte outside a sequence, if not valid
  std::size_t num_multibyte = 0;  ///< well-formed sequences of more than one byte
  std::size_t num_invalid = 0;    ///< bytes outside any sequence
};

/// Looks at every byte once.
Utf8Scan scan_utf8(std::string_view text);

/// Rewrites bytes 0..255 as the characters U+0000..U+00FF.
std::string latin1_to_utf8(std::string_view text);

/// Returns at most `max_bytes` bytes of well-formed `text`, cut between characters.
std::string_view utf8_prefix(std::string_view text, std::size_t max_bytes);

}  // namespace hypershard::data::internal
