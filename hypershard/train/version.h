// Why: one place that knows the version which the build was configured with.
#pragma once

#include <string>

namespace hypershard::train {

/// Returns the version, e.g. `0.1.0`.
std::string version();
/// Describes the build: compiler, build type.
std::string build_description();

}  // namespace hypershard::train
