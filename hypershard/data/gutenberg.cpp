// Why: the scan behind gutenberg.h: line by line, offsets only, no copies.
// A marker must begin its line, so that a text that talks about one is left alone.
#include "hypershard/data/gutenberg.h"

#include <algorithm>
#include <cctype>
#include <initializer_list>

namespace hypershard::data {
namespace {

struct Line {
  std::string_view text;  // without its end and the white space around
  std::size_t begin = 0;
  std::size_t next = 0;  // where the following line begins
};

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n\f\v";
  const std::size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) {
    return {};
  }
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

Line line_at(std::string_view text, std::size_t begin) {
  const std::size_t end = text.find('\n', begin);
  const std::size_t next = end == std::string_view::npos ? text.size() : end + 1;
  return {trimmed(text.substr(begin, next - begin)), begin, next};
}

// Compares letters without case; a space in `prefix` stands for any run of spaces, also none.
bool begins(std::string_view text, std::string_view prefix) {
  std::size_t at = 0;
  for (const char wanted : prefix) {
    if (wanted == ' ') {
      while (at < text.size() && text[at] == ' ') {
        ++at;
      }
      continue;
    }
    if (at == text.size() || std::tolower(static_cast<unsigned char>(text[at])) !=
                                 std::tolower(static_cast<unsigned char>(wanted))) {
      return false;
    }
    ++at;
  }
  return true;
}

bool begins_any(std::string_view text, std::initializer_list<std::string_view> prefixes) {
  return std::any_of(prefixes.begin(), prefixes.end(), [&](std::string_view prefix) {
    return begins(text, prefix);
  });
}

bool is_modern_start(std::string_view line) {
  return begins_any(
      line,
      {"*** START OF THE PROJECT GUTENBERG EBOOK",
       "*** START OF THIS PROJECT GUTENBERG EBOOK",
       "*** START OF THE PROJECT GUTENBERG ETEXT",
       "*** START OF THIS PROJECT GUTENBERG ETEXT"}
  );
}

bool is_small_print_end(std::string_view line) {
  return begins_any(line, {"*END* THE SMALL PRINT!", "*END THE SMALL PRINT!"});
}

bool is_end(std::string_view line) {
  return begins_any(
      line,
      {"*** END OF THE PROJECT GUTENBERG EBOOK",
       "*** END OF THIS PROJECT GUTENBERG EBOOK",
       "*** END OF THE PROJECT GUTENBERG ETEXT",
       "*** END OF THIS PROJECT GUTENBERG ETEXT",
       "End of Project Gutenberg",
       "End of the Project Gutenberg",
       "End of this Project Gutenberg"}
  );
}

// Returns where the marker that begins with `line` ends, or npos if there is none.
std::size_t start_marker_end(std::string_view text, const Line& line) {
  if (is_small_print_end(line.text)) {
    return line.next;
  }
  if (!is_modern_start(line.text)) {
    return std::string_view::npos;
  }
  constexpr int kMaxFurtherLines = 2;
  Line last = line;
  for (int i = 0; i <= kMaxFurtherLines; ++i) {
    const std::size_t length = last.text.size();
    // The opening stars of a marker without closing ones must not count as closing.
    if (last.text.ends_with("***") && (i > 0 || length > 3)) {
      return last.next;
    }
    if (i < kMaxFurtherLines) {
      last = line_at(text, last.next);
    }
  }
  return line.next;
}

std::size_t skip_blank_lines(std::string_view text, std::size_t begin) {
  while (begin < text.size()) {
    const Line line = line_at(text, begin);
    if (!line.text.empty()) {
      break;
    }
    begin = line.next;
  }
  return begin;
}

std::size_t skip_credits(std::string_view text, std::size_t begin) {
  if (!begins_any(line_at(text, begin).text, {"Produced by ", "E-text prepared by "})) {
    return begin;
  }
  while (begin < text.size() && !line_at(text, begin).text.empty()) {
    begin = line_at(text, begin).next;
  }
  return skip_blank_lines(text, begin);
}

}  // namespace

GutenbergBody strip_gutenberg(std::string_view text) {
  constexpr std::size_t kNone = std::string_view::npos;
  std::size_t begin = kNone;
  std::size_t end = kNone;
  for (std::size_t at = 0; at < text.size();) {
    const Line line = line_at(text, at);
    const std::size_t marker_end = start_marker_end(text, line);
    if (marker_end != kNone) {
      begin = marker_end;
      end = kNone;
    } else if (end == kNone && is_end(line.text)) {
      end = line.begin;
    }
    at = marker_end != kNone ? marker_end : line.next;
  }
  std::size_t first = begin == kNone ? 0 : begin;
  std::size_t last = end == kNone ? text.size() : end;
  if (begin != kNone) {
    first = std::min(last, skip_blank_lines(text, first));
    first = std::min(last, skip_credits(text, first));
  }
  if (end != kNone) {
    const std::size_t letter = text.substr(0, last).find_last_not_of(" \t\r\n\f\v");
    // The end of the last line stays, as in any text file.
    const std::size_t line_end = letter == kNone ? 0 : line_at(text, letter).next;
    last = std::max(first, std::min(last, line_end));
  }
  return {text.substr(first, last - first), first, text.size() - last};
}

bool has_gutenberg_markers(std::string_view text) {
  const GutenbergBody found = strip_gutenberg(text);
  return found.head_bytes > 0 || found.tail_bytes > 0;
}

}  // namespace hypershard::data
