// Why: the pattern language of glob.h. Braces are expanded when a pattern is parsed, so that
// matching is a plain walk with backtracking over `*` and `**`.
#include "hypershard/core/glob.h"

#include "hypershard/core/error.h"

namespace hypershard {
namespace {

constexpr std::size_t kMaxAlternatives = 1024;

[[noreturn]] void fail_pattern(
    std::string_view pattern, std::size_t column, std::string_view fault, std::string_view remedy
) {
  HS_FAIL(
      InvalidArgument,
      "glob: pattern '",
      pattern,
      "', column ",
      column + 1,
      ": ",
      fault,
      HS_HINT(remedy)
  );
}

/// Returns the position after the class that opens at `open`.
std::size_t skip_class(std::string_view pattern, std::size_t open) {
  std::size_t at = open + 1;
  if (at < pattern.size() && pattern[at] == '!') {
    ++at;
  }
  const std::size_t first = at;
  for (; at < pattern.size() && (pattern[at] != ']' || at == first); ++at) {
    const bool is_range =
        at + 2 < pattern.size() && pattern[at + 1] == '-' && pattern[at + 2] != ']';
    if (is_range) {
      if (pattern[at] > pattern[at + 2]) {
        fail_pattern(
            pattern, at, "the range runs backwards", "write the lower end first, as in [0-9]"
        );
      }
      at += 2;
    }
  }
  if (at >= pattern.size()) {
    fail_pattern(
        pattern, open, "'[' is never closed", "add ']', or write \\[ for the letter itself"
    );
  }
  return at + 1;
}

/// Returns the position after the element (letter, escape, class) that starts at `at`.
std::size_t skip_element(std::string_view pattern, std::size_t at) {
  if (pattern[at] == '[') {
    return skip_class(pattern, at);
  }
  if (pattern[at] == '\\') {
    if (at + 1 == pattern.size()) {
      fail_pattern(pattern, at, "nothing follows '\\'", "write \\\\ for the letter itself");
    }
    return at + 2;
  }
  return at + 1;
}

/// Checks the whole pattern, so that a fault is reported at its own column.
void validate(std::string_view pattern) {
  HS_CHECK(!pattern.empty(), "glob: the pattern is empty", HS_HINT("write ** to match every path"));
  std::vector<std::size_t> open;
  for (std::size_t at = 0; at < pattern.size(); at = skip_element(pattern, at)) {
    if (pattern[at] == '{') {
      open.push_back(at);
    } else if (pattern[at] == '}') {
      if (open.empty()) {
        fail_pattern(
            pattern, at, "'}' was never opened", "add '{', or write \\} for the letter itself"
        );
      }
      open.pop_back();
    }
  }
  if (!open.empty()) {
    fail_pattern(
        pattern, open.back(), "'{' is never closed", "add '}', or write \\{ for the letter itself"
    );
  }
}

/// The first outermost `{...}` of a pattern: the positions of its braces and of the commas of its
/// level. Empty if there is none.
std::vector<std::size_t> find_braces(std::string_view pattern) {
  std::vector<std::size_t> cuts;
  std::size_t depth = 0;
  for (std::size_t at = 0; at < pattern.size(); at = skip_element(pattern, at)) {
    const char c = pattern[at];
    depth += c == '{' ? 1 : 0;
    if (depth == 1 && (c == '{' || c == ',' || c == '}')) {
      cuts.push_back(at);
    }
    if (c == '}' && --depth == 0) {
      return cuts;
    }
  }
  return cuts;
}

void expand(
    std::string_view pattern, std::string_view whole, std::vector<std::string>& alternatives
) {
  const std::vector<std::size_t> cuts = find_braces(pattern);
  if (cuts.empty()) {
    HS_CHECK_LT(
        alternatives.size(),
        kMaxAlternatives,
        "glob: pattern '",
        whole,
        "' stands for too many alternatives (at most ",
        kMaxAlternatives,
        ")",
        HS_HINT("use '*' or a class like [0-9] in place of some braces")
    );
    alternatives.emplace_back(pattern);
    return;
  }
  for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
    std::string chosen(pattern.substr(0, cuts.front()));
    chosen += pattern.substr(cuts[i] + 1, cuts[i + 1] - cuts[i] - 1);
    chosen += pattern.substr(cuts.back() + 1);
    expand(chosen, whole, alternatives);
  }
}

/// Tells whether `c` lies in the class `body`, the text between the brackets.
bool in_class(std::string_view body, char c) {
  const bool negated = body.starts_with('!');
  if (negated) {
    body.remove_prefix(1);
  }
  bool found = false;
  for (std::size_t i = 0; i < body.size(); ++i) {
    if (i + 2 < body.size() && body[i + 1] == '-') {
      found = found || (body[i] <= c && c <= body[i + 2]);
      i += 2;
    } else {
      found = found || body[i] == c;
    }
  }
  return negated ? !found && c != '.' : found;
}

/// Matches one letter against the element at the front of `pattern`, whose length is `length`.
bool match_element(std::string_view pattern, std::size_t length, char c) {
  switch (pattern.front()) {
    case '[':
      return in_class(pattern.substr(1, length - 2), c);
    case '?':
      return c != '.';
    default:
      return pattern[length - 1] == c;  // an escape's letter is its last
  }
}

bool match_here(std::string_view pattern, std::string_view path, bool at_component_start);

/// Matches what follows a star; `crosses` tells `**` from `*`.
bool match_star(
    std::string_view rest, std::string_view path, bool at_component_start, bool crosses
) {
  // `**.` at the start of a component may stand for nothing.
  if (crosses && at_component_start && rest.starts_with('.') &&
      match_here(rest.substr(1), path, true)) {
    return true;
  }
  for (std::size_t skip = 0; skip <= path.size(); ++skip) {
    if (skip > 0 && path[skip - 1] == '.') {
      if (!crosses) {
        return false;
      }
      at_component_start = true;
    } else {
      at_component_start = at_component_start && skip == 0;
    }
    if (match_here(rest, path.substr(skip), at_component_start)) {
      return true;
    }
  }
  return false;
}

/// Matches one brace-free pattern. Patterns and paths are short, so recursion at each star is fine.
bool match_here(std::string_view pattern, std::string_view path, bool at_component_start) {
  while (!pattern.empty()) {
    if (pattern.front() == '*') {
      const bool crosses = pattern.starts_with("**");
      return match_star(pattern.substr(crosses ? 2 : 1), path, at_component_start, crosses);
    }
    if (path.empty()) {
      return pattern == ".**";
    }
    const std::size_t length = skip_element(pattern, 0);
    if (!match_element(pattern, length, path.front())) {
      return false;
    }
    at_component_start = path.front() == '.';
    pattern.remove_prefix(length);
    path.remove_prefix(1);
  }
  return path.empty();
}

}  // namespace

Glob::Glob(std::string_view pattern) : pattern_(pattern) {
  validate(pattern);
  expand(pattern, pattern, alternatives_);
}

bool Glob::matches(std::string_view path) const {
  for (const std::string& alternative : alternatives_) {
    if (match_here(alternative, path, true)) {
      return true;
    }
  }
  return false;
}

bool glob_match(std::string_view pattern, std::string_view path) {
  return Glob(pattern).matches(path);
}

}  // namespace hypershard
