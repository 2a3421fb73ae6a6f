// Why: Project Gutenberg wraps a text in its licence, and a model would learn the licence by heart.
// The rule is small and stated here, so that one can tell what was cut.
#pragma once

#include <cstddef>
#include <string_view>

namespace hypershard::data {

/// The text between the wrappings, and how much was cut on each side.
struct GutenbergBody {
  std::string_view body;
  std::size_t head_bytes = 0;
  std::size_t tail_bytes = 0;
};

/// Finds the text that Project Gutenberg's markers enclose. The rule, letter case ignored:
///
/// - The text begins behind the last start marker and ends before the first end marker that follows
///   it. A missing marker cuts nothing on its side; a text without markers comes back whole.
/// - A start marker is a line that begins `*** START OF THE PROJECT GUTENBERG EBOOK` (also THIS,
///   also ETEXT; up to two further lines belong to it until one ends with `***`), or the older
///   `*END*THE SMALL PRINT!` and `*END THE SMALL PRINT!`.
/// - An end marker is a line that begins `*** END OF THE PROJECT GUTENBERG EBOOK` (also THIS, also
///   ETEXT), or `End of Project Gutenberg` (also with `the` or `this`).
/// - Blank lines next to a cut go with it, and so does a first paragraph behind it that begins
///   `Produced by` or `E-text prepared by`.
///
/// Lines end with LF or CR LF; what remains keeps its bytes.
GutenbergBody strip_gutenberg(std::string_view text);

/// Tells whether strip_gutenberg would cut anything.
bool has_gutenberg_markers(std::string_view text);

}  // namespace hypershard::data
