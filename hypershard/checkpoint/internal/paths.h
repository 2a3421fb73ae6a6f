// Why: the names that make an unfinished checkpoint differ from a whole one, in one place.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace hypershard::checkpoint::internal {

inline constexpr const char* kLatestFile = "latest";
inline constexpr const char* kPartialSuffix = ".tmp";

/// Returns `step-NNNNNNNN`.
std::string step_name(std::int64_t step);
/// Reads the step from such a name; nothing if it is another name.
std::optional<std::int64_t> parse_step_name(std::string_view name);
/// Finds the folder of a checkpoint from its own path, or from a directory with a `latest` file.
/// Errors: IoError saying what is there instead.
std::string find_folder(const std::string& path);

}  // namespace hypershard::checkpoint::internal
