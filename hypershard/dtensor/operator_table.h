// The list of operators with layout rules, as text for the program and its documentation.
#pragma once

#include <string>

namespace hypershard::dtensor {

/// Describes the operators that have rules, by family, as text or as Markdown.
std::string describe_operators(bool as_markdown);

}  // namespace hypershard::dtensor
