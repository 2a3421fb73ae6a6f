// Why: messages, logs and hashes name element types in one way, the one users know from Python.
// Internal to the module.
#pragma once

#include <string>

#include <c10/core/ScalarType.h>

namespace hypershard::comm::internal {

/// Returns the element type as Python writes it, e.g. `bfloat16`.
std::string dtype_text(c10::ScalarType dtype);

}  // namespace hypershard::comm::internal
