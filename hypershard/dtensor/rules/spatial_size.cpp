// torch's formulas for sliding windows.
#include "hypershard/dtensor/rules/spatial_size.h"

namespace hypershard::dtensor::rules {

std::vector<std::int64_t> repeated(
    std::vector<std::int64_t> values, int count, std::int64_t otherwise
) {
  if (values.empty()) {
    values.push_back(otherwise);
  }
  while (values.size() < static_cast<std::size_t>(count)) {
    values.push_back(values.back());
  }
  return values;
}

std::int64_t window_count(std::int64_t size, const Window& window, std::size_t i) {
  const std::int64_t reach = window.dilation[i] * (window.kernel[i] - 1) + 1;
  const std::int64_t room = size + 2 * window.padding[i] - reach;
  const std::int64_t stride = window.stride[i];
  if (room < 0) {
    return 0;
  }
  std::int64_t count = room / stride + 1;
  if (window.is_ceil && room % stride != 0) {
    // A last window must begin inside the image or its padding on the left.
    count += (count * stride < size + window.padding[i]) ? 1 : 0;
  }
  return count;
}

}  // namespace hypershard::dtensor::rules
