// Why: plans, optimizer families and configurations name groups of modules and parameters by
// pattern. One small pattern language, so that a pattern means the same everywhere.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace hypershard {

/// A pattern over dotted module paths such as `blocks.3.mlp.w1`.
///
/// ```
/// *        any letters within one component, also none        blocks.*.mlp
/// **       any letters, dots included; `**.` and `.**` may also stand for nothing: `**.bias`
/// matches
///          `bias` and `a.b.bias`, `blocks.**` matches `blocks` and all below it
/// ?        one letter that is not a dot
/// [0-9a]   one letter of the set; [!0-9] one letter, not a dot, outside it
/// {a,b}    either text; alternatives may hold any of these and further braces
/// \c       the letter c itself
/// ```
/// Everything else stands for itself; the whole path must match, letter case counts.
/// Threads: const methods may run concurrently.
class Glob {
 public:
  /// Parses `pattern`.
  /// Errors: InvalidArgument naming pattern, column and fault.
  explicit Glob(std::string_view pattern);

  /// Tells whether the whole path matches.
  bool matches(std::string_view path) const;
  const std::string& pattern() const { return pattern_; }

 private:
  std::string pattern_;
  std::vector<std::string> alternatives_;  // brace-free patterns
};

/// Matches `path` against `pattern` once; keep a `Glob` where the pattern is used again.
bool glob_match(std::string_view pattern, std::string_view path);

}  // namespace hypershard
