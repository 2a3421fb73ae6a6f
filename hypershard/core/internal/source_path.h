// Why: messages show source files relative to the repository, whatever directory the build ran in.
// Builds with -ffile-prefix-map already do; this covers the others.
#pragma once

#include <string_view>

namespace hypershard::internal {

/// Cuts the repository's root off a `__FILE__`; other paths stay whole.
std::string_view repo_relative(std::string_view file);

/// Names the module a `__FILE__` belongs to: `comm` for `hypershard/comm/shm/arena.cpp`, else the
/// name of the file's folder.
std::string_view module_of(std::string_view file);

}  // namespace hypershard::internal
