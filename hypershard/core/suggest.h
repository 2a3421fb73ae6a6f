// Why: a wrong name in a configuration, an axis or a variable is mostly a slip of the finger.
// One function finds what was meant, so that every message can say "did you mean".
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace hypershard {

/// Returns the candidates nearest to `name`, best first, at most `limit`; empty if none is near.
///
/// Distance is the number of letters to insert, delete, replace or swap with a neighbour (case
/// ignored); near means at most a third of the longer name, or that one name begins the other. Ties
/// keep the candidates' order.
std::vector<std::string> nearest_names(
    std::string_view name, std::span<const std::string> candidates, int limit = 3
);

/// Writes `did you mean 'shard'?` or `did you mean 'a' or 'b'?`; empty if no candidate is near.
std::string suggestion(std::string_view name, std::span<const std::string> candidates);

}  // namespace hypershard
