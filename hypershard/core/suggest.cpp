// Why: edit distance for "did you mean"; see suggest.h.
// Optimal string alignment distance (Damerau-Levenshtein restricted to one edit per substring).
#include "hypershard/core/suggest.h"

#include <algorithm>
#include <cctype>
#include <numeric>
#include <utility>

namespace hypershard {
namespace {

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) {
    c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return result;
}

std::size_t edit_distance(const std::string& a, const std::string& b) {
  const std::size_t width = b.size() + 1;
  std::vector<std::size_t> before(width), above(width), row(width);
  std::iota(above.begin(), above.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replace = above[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, replace});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
    before.swap(above);
    above.swap(row);
  }
  return above[b.size()];
}

struct Ranked {
  std::size_t distance;
  std::size_t index;
};

}  // namespace

std::vector<std::string> nearest_names(
    std::string_view name, std::span<const std::string> candidates, int limit
) {
  constexpr std::size_t kMinPrefix = 3;
  const std::string wanted = lower(name);
  std::vector<Ranked> near;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const std::string candidate = lower(candidates[i]);
    const std::size_t longer = std::max(wanted.size(), candidate.size());
    const std::size_t shorter = std::min(wanted.size(), candidate.size());
    const std::size_t distance = edit_distance(wanted, candidate);
    const bool begins =
        shorter >= kMinPrefix && (candidate.starts_with(wanted) || wanted.starts_with(candidate));
    const bool is_slip = distance <= std::max<std::size_t>(1, longer / 3) && distance < longer;
    if (is_slip || begins) {
      near.push_back({.distance = distance, .index = i});
    }
  }
  std::stable_sort(near.begin(), near.end(), [](const Ranked& a, const Ranked& b) {
    return a.distance < b.distance;
  });
  std::vector<std::string> names;
  for (const Ranked& ranked : near) {
    if (std::cmp_less(names.size(), limit)) {
      names.push_back(candidates[ranked.index]);
    }
  }
  return names;
}

std::string suggestion(std::string_view name, std::span<const std::string> candidates) {
  const std::vector<std::string> names = nearest_names(name, candidates, 2);
  if (names.empty()) {
    return "";
  }
  std::string text = "did you mean '" + names[0] + "'";
  if (names.size() > 1) {
    text += " or '" + names[1] + "'";
  }
  return text + "?";
}

}  // namespace hypershard
