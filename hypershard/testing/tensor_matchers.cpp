// Why: see tensor_matchers.h. Comparisons run in float64 on CPU copies.
#include "hypershard/testing/tensor_matchers.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "hypershard/core/text.h"

namespace hypershard::testing {
namespace {

/// What a pass over both tensors found.
struct Findings {
  std::int64_t num_wrong = 0;
  std::int64_t worst = -1;  ///< flat index of the wrong element that is furthest off
  double worst_error = -1;
  double max_absolute = 0;
  double max_relative = 0;
  double max_share = 0;  ///< of the tolerance
};

at::Tensor as_doubles(const at::Tensor& tensor) {
  return tensor.detach().cpu().to(at::kDouble).contiguous();
}

void note(
    Findings& found, std::int64_t index, double actual, double expected, double allowed, bool wrong
) {
  const bool both_nan = std::isnan(actual) && std::isnan(expected);
  double error = both_nan || actual == expected ? 0 : std::abs(actual - expected);
  error = std::isnan(error) ? std::numeric_limits<double>::infinity() : error;
  found.max_absolute = std::max(found.max_absolute, error);
  if (error > 0) {
    found.max_relative = std::max(found.max_relative, error / std::abs(expected));
    found.max_share = std::max(found.max_share, error / allowed);
  }
  if (wrong) {
    ++found.num_wrong;
    if (error > found.worst_error) {
      found.worst_error = error;
      found.worst = index;
    }
  }
}

std::string index_text(std::int64_t flat, at::IntArrayRef sizes) {
  std::vector<std::int64_t> index(sizes.size());
  for (std::size_t dim = sizes.size(); dim-- > 0;) {
    index[dim] = flat % sizes[dim];
    flat /= sizes[dim];
  }
  return text_of(index);
}

std::string shape_difference(const at::Tensor& actual, const at::Tensor& expected) {
  if (!actual.defined() || !expected.defined()) {
    return actual.defined() == expected.defined() ? "" : "one of them is an undefined tensor";
  }
  return actual.sizes() == expected.sizes()
             ? ""
             : concat_text("sizes ", actual.sizes(), " (expected ", expected.sizes(), ")");
}

std::string findings_text(
    const Findings& found, const at::Tensor& actual, const at::Tensor& expected
) {
  const double got = actual.const_data_ptr<double>()[found.worst];
  const double right = expected.const_data_ptr<double>()[found.worst];
  return concat_text(
      found.num_wrong,
      " of ",
      actual.numel(),
      " elements differ; worst at ",
      index_text(found.worst, actual.sizes()),
      ": ",
      got,
      " (expected ",
      right,
      "); max abs error ",
      found.max_absolute,
      ", max rel error ",
      found.max_relative
  );
}

}  // namespace

std::string tensor_difference(const at::Tensor& actual, const at::Tensor& expected) {
  std::string shapes = shape_difference(actual, expected);
  if (!shapes.empty() || !actual.defined()) {
    return shapes;
  }
  if (actual.scalar_type() != expected.scalar_type()) {
    return concat_text(
        "dtype ",
        c10::toString(actual.scalar_type()),
        " (expected ",
        c10::toString(expected.scalar_type()),
        ")"
    );
  }
  const at::Tensor left = actual.detach().cpu().contiguous();
  const at::Tensor right = expected.detach().cpu().contiguous();
  const std::size_t element = left.element_size();
  const auto* left_bytes = static_cast<const char*>(left.const_data_ptr());
  const auto* right_bytes = static_cast<const char*>(right.const_data_ptr());
  const auto numel = static_cast<std::size_t>(left.numel());
  if (numel == 0 || std::memcmp(left_bytes, right_bytes, numel * element) == 0) {
    return "";
  }
  const at::Tensor left_values = as_doubles(left);
  const at::Tensor right_values = as_doubles(right);
  Findings found;
  for (std::size_t i = 0; i < numel; ++i) {
    const bool wrong =
        std::memcmp(left_bytes + i * element, right_bytes + i * element, element) != 0;
    const double got = left_values.const_data_ptr<double>()[i];
    note(
        found, static_cast<std::int64_t>(i), got, right_values.const_data_ptr<double>()[i], 0, wrong
    );
  }
  return findings_text(found, left_values, right_values);
}

std::string tensor_difference(
    const at::Tensor& actual, const at::Tensor& expected, const Tolerance& tolerance
) {
  std::string shapes = shape_difference(actual, expected);
  if (!shapes.empty() || !actual.defined()) {
    return shapes;
  }
  const at::Tensor left = as_doubles(actual);
  const at::Tensor right = as_doubles(expected);
  Findings found;
  for (std::int64_t i = 0; i < left.numel(); ++i) {
    const double got = left.const_data_ptr<double>()[i];
    const double wanted = right.const_data_ptr<double>()[i];
    const double allowed = tolerance.absolute + tolerance.relative * std::abs(wanted);
    const bool both_nan = std::isnan(got) && std::isnan(wanted);
    const bool right_value = both_nan || got == wanted || std::abs(got - wanted) <= allowed;
    note(found, i, got, wanted, allowed, !right_value);
  }
  if (found.num_wrong == 0) {
    return "";
  }
  return findings_text(found, left, right) + concat_text(
                                                 "; ",
                                                 found.max_share * 100,
                                                 " % of the tolerance (relative ",
                                                 tolerance.relative,
                                                 ", absolute ",
                                                 tolerance.absolute,
                                                 ") used"
                                             );
}

}  // namespace hypershard::testing
