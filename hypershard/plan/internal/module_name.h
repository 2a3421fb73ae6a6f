// Whether a message names a module already: paths are short words, such as `embed`, and operators'
// names are full of them.
#pragma once

#include <string>

namespace hypershard::plan::internal {

/// Tells whether `text` names the path of a module, as a word or as the beginning of one that goes
/// on with a dot.
bool names_module(const std::string& text, const std::string& module);

}  // namespace hypershard::plan::internal
