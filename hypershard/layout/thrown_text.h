// For the tests of this folder: the text of an expected error.
// A test that asserts on the type alone passes for the wrong reason.
#pragma once

#include <string>

#include "hypershard/core/error.h"

namespace hypershard::layout {

/// Returns the text of the InvalidArgument that `action` throws, or says that it threw none.
template <class Action>
std::string thrown_text(Action action) {
  try {
    action();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "(threw no InvalidArgument)";
}

/// Tells whether `text` contains all of `fragments`.
template <class... Fragments>
bool contains_all(const std::string& text, const Fragments&... fragments) {
  return ((text.find(fragments) != std::string::npos) && ...);
}

}  // namespace hypershard::layout

/// Expects an InvalidArgument whose text contains every fragment.
#define HS_EXPECT_INVALID(statement, ...)                                                     \
  do {                                                                                        \
    const std::string text = ::hypershard::layout::thrown_text([&] { (void)(statement); });   \
    EXPECT_TRUE(::hypershard::layout::contains_all(text, __VA_ARGS__)) << "thrown: " << text; \
  } while (false)
