// What c10d and Gloo say when they fail, cut to the part that a reader can use.
#pragma once

#include <exception>
#include <string>

namespace hypershard::comm::internal {

/// Returns the first sentence of the error, without stack traces and places in the back end's
/// sources.
std::string backend_text(const std::exception& error);

}  // namespace hypershard::comm::internal
