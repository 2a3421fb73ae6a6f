// Sizes of images after windows slide over them; spatial dimensions are whole, so that local sizes
// are global ones.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "hypershard/dtensor/rule_call.h"

namespace hypershard::dtensor::rules {

/// How windows slide, one entry a spatial dimension; single integers are repeated.
struct Window {
  std::vector<std::int64_t> kernel;
  std::vector<std::int64_t> stride;
  std::vector<std::int64_t> padding;
  std::vector<std::int64_t> dilation;
  bool is_ceil = false;
};

/// Repeats a single entry `count` times.
std::vector<std::int64_t> repeated(
    std::vector<std::int64_t> values, int count, std::int64_t otherwise
);

/// Returns how many windows fit along spatial dimension `i` of size `size`.
std::int64_t window_count(std::int64_t size, const Window& window, std::size_t i);

}  // namespace hypershard::dtensor::rules
