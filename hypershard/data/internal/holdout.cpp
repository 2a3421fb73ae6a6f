// Why: matching of selectors to documents, from the strictest reading to the loosest.
// The first reading that fits anything decides, so a full name is never ambiguous.
#include "hypershard/data/internal/holdout.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <fnmatch.h>
#include <functional>

#include "hypershard/core/error.h"
#include "hypershard/core/suggest.h"
#include "hypershard/data/internal/sha256.h"

namespace hypershard::data::internal {
namespace {

// Lower case, separators as single spaces: `HAMLET, Prince` becomes `hamlet prince`.
std::string plain(std::string_view text) {
  std::string result;
  for (const char character : text) {
    const auto byte = static_cast<unsigned char>(character);
    if (std::isalnum(byte) != 0 || byte >= 0x80) {
      result += static_cast<char>(std::tolower(byte));
    } else if (character != '\'' && character != ',' && !result.empty() && result.back() != ' ') {
      result += ' ';
    }
  }
  if (result.ends_with(' ')) {
    result.pop_back();
  }
  return result;
}

bool has_words(std::string_view text, std::string_view words) {
  const std::string padded = " " + std::string(text) + " ";
  return padded.find(" " + std::string(words) + " ") != std::string::npos;
}

// The words with which every name ends, with a space in front: ` gut` for `lear_gut`, `hamlet_gut`.
std::string common_ending(const std::vector<std::string>& names) {
  if (names.size() < 2) {
    return {};
  }
  std::string ending = names.front();
  for (const std::string& name : names) {
    std::size_t length = 0;
    while (length < ending.size() && length < name.size() &&
           ending[ending.size() - 1 - length] == name[name.size() - 1 - length]) {
      ++length;
    }
    ending = ending.substr(ending.size() - length);
  }
  const std::size_t space = ending.find(' ');
  return space == std::string::npos ? std::string() : ending.substr(space);
}

// All the ways in which documents can be named, prepared once.
class Labels {
 public:
  explicit Labels(const std::vector<DocumentLabel>& documents);

  std::vector<std::size_t> find(const std::string& selector) const;
  std::string suggestion_for(const std::string& selector) const;

 private:
  std::vector<std::size_t> matching(const std::function<bool(std::size_t)>& matches) const;

  const std::vector<DocumentLabel>& documents_;
  std::vector<std::string> names_;
  std::vector<std::string> short_names_;
  std::vector<std::string> titles_;
};

Labels::Labels(const std::vector<DocumentLabel>& documents) : documents_(documents) {
  for (const DocumentLabel& document : documents) {
    names_.push_back(plain(document.name));
    titles_.push_back(plain(document.title));
  }
  const std::size_t ending = common_ending(names_).size();
  for (const std::string& name : names_) {
    short_names_.push_back(name.substr(0, name.size() - ending));
  }
}

std::vector<std::size_t> Labels::matching(const std::function<bool(std::size_t)>& matches) const {
  std::vector<std::size_t> found;
  for (std::size_t i = 0; i < documents_.size(); ++i) {
    if (matches(i)) {
      found.push_back(i);
    }
  }
  return found;
}

std::vector<std::size_t> Labels::find(const std::string& selector) const {
  auto found = matching([&](std::size_t i) { return documents_[i].name == selector; });
  if (!found.empty()) {
    return found;
  }
  if (selector.find_first_of("*?[") != std::string::npos) {
    return matching([&](std::size_t i) {
      return ::fnmatch(selector.c_str(), documents_[i].name.c_str(), 0) == 0;
    });
  }
  const std::string wanted = plain(selector);
  if (wanted.empty()) {
    return {};
  }
  found = matching([&](std::size_t i) {
    return names_[i] == wanted || short_names_[i] == wanted || titles_[i] == wanted;
  });
  if (found.empty()) {
    found = matching([&](std::size_t i) {
      return has_words(names_[i], wanted) || has_words(titles_[i], wanted);
    });
  }
  return found;
}

std::string Labels::suggestion_for(const std::string& selector) const {
  const std::string wanted = plain(selector);
  for (const auto& candidates : {short_names_, titles_, names_}) {
    std::string text = suggestion(wanted, candidates);
    if (!text.empty()) {
      return text;
    }
  }
  return "the documents are " + text_of(short_names_);
}

void hold_out_named(
    const std::vector<DocumentLabel>& documents,
    const std::vector<std::string>& selectors,
    std::vector<bool>& held_out
) {
  const Labels labels(documents);
  for (const std::string& selector : selectors) {
    const std::vector<std::size_t> found = labels.find(selector);
    HS_CHECK(
        !found.empty(),
        "data: holdout '",
        selector,
        "' matches none of ",
        documents.size(),
        " documents",
        HS_HINT(labels.suggestion_for(selector))
    );
    if (found.size() > 1 && selector.find_first_of("*?[") == std::string::npos) {
      std::vector<std::string> names;
      for (const std::size_t i : found) {
        names.push_back(documents[i].name);
      }
      HS_FAIL(
          InvalidArgument,
          "data: holdout '",
          selector,
          "' matches ",
          found.size(),
          " documents (expected 1): ",
          names,
          HS_HINT("give a whole name, or a pattern such as '", selector, "*' to hold out several")
      );
    }
    for (const std::size_t i : found) {
      held_out[i] = true;
    }
  }
}

void hold_out_fraction(
    const std::vector<DocumentLabel>& documents,
    const PrepareOptions& options,
    std::vector<bool>& held_out
) {
  std::vector<std::pair<std::string, std::size_t>> order;
  for (std::size_t i = 0; i < documents.size(); ++i) {
    order.emplace_back(sha256_hex(std::to_string(options.seed) + "/" + documents[i].name), i);
  }
  std::sort(order.begin(), order.end());
  const double exact = options.holdout_fraction * static_cast<double>(documents.size());
  // A share such as 0.1 of 10 must not become 2 by rounding error.
  const auto count = static_cast<std::size_t>(std::ceil(exact - 1e-9));
  for (std::size_t i = 0; i < std::min(count, order.size()); ++i) {
    held_out[order[i].second] = true;
  }
}

}  // namespace

std::vector<bool> choose_holdout(
    const std::vector<DocumentLabel>& documents, const PrepareOptions& options
) {
  HS_CHECK(
      options.holdout_fraction >= 0.0 && options.holdout_fraction < 1.0,
      "data: holdout_fraction is ",
      options.holdout_fraction,
      " (expected 0 up to but not including 1)"
  );
  std::vector<bool> held_out(documents.size(), false);
  if (options.holdout.empty()) {
    hold_out_fraction(documents, options, held_out);
  } else {
    hold_out_named(documents, options.holdout, held_out);
  }
  const auto num_train = std::count(held_out.begin(), held_out.end(), false);
  HS_CHECK(
      num_train > 0,
      "data: nothing is left to train on: all ",
      documents.size(),
      " documents are held out",
      HS_HINT(
          "whole documents are held out: give more files, cut a large one into several, or set the "
          "holdout fraction to 0 to train without evaluation"
      )
  );
  return held_out;
}

}  // namespace hypershard::data::internal
