// Why: names and limits of the safetensors format that reader and writer share.
// The table of dtypes is in the writer's source.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/ScalarType.h>

namespace hypershard::checkpoint::internal {

inline constexpr const char* kMetadataKey = "__metadata__";
/// The limit of the format's own library.
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;

/// Finds a dtype by the format's name.
std::optional<c10::ScalarType> find_dtype(std::string_view name);
/// Returns all names that find_dtype knows.
std::vector<std::string> dtype_names();

}  // namespace hypershard::checkpoint::internal
