// Why: what is held out decides what an evaluation means, so it is chosen by name and checked.
// A selector that fits nothing, or too much, is an error rather than a guess.
#pragma once

#include <string>
#include <vector>

#include "hypershard/data/prepare.h"

namespace hypershard::data::internal {

/// What a document can be called.
struct DocumentLabel {
  std::string name;
  std::string title;
};

/// Decides for every document whether it is held out.
///
/// With `options.holdout`, each selector is looked up, letter case and the characters `_-./` aside:
/// a pattern with `*`, `?` or `[` takes all documents whose name it matches; else an equal name,
/// title or name without what all names have in common at their ends; else whole words inside one
/// name or title. Otherwise `options.holdout_fraction` of the documents, at least one, by a hash of
/// seed and name, so that adding documents moves few others. Errors: InvalidArgument if a selector
/// fits no document (with the nearest names) or more than one
///         without being a pattern, or if nothing is left to train on.
std::vector<bool> choose_holdout(
    const std::vector<DocumentLabel>& documents, const PrepareOptions& options
);

}  // namespace hypershard::data::internal
