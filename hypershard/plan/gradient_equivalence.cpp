// See gradient_equivalence.h.
#include "hypershard/plan/gradient_equivalence.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include "hypershard/core/error.h"
#include "hypershard/plan/tracker.h"

namespace hypershard::plan {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor flat_double(const at::Tensor& tensor) {
  return tensor.detach().to(at::kDouble).flatten();
}

double norm_of(const at::Tensor& flat) {
  return std::sqrt(flat.dot(flat).item<double>());
}

double typical_norm(const NamedGradients& gradients) {
  double sum = 0;
  for (const auto& item : gradients) {
    const double norm = norm_of(flat_double(item.second));
    sum += norm * norm;
  }
  return gradients.empty() ? 0 : std::sqrt(sum / static_cast<double>(gradients.size()));
}

GradientRow failed_row(const std::string& name, double norm, double bound, std::string note) {
  return {
      .name = name,
      .relative_error = kInfinity,
      .cosine = 0,
      .reference_norm = norm,
      .bound = bound,
      .passed = false,
      .note = std::move(note)
  };
}

GradientRow compare_one(
    const std::string& name, const at::Tensor& found, const at::Tensor& reference, double floor
) {
  const at::Tensor expected = flat_double(reference);
  const double norm = norm_of(expected);
  const double bound = gradient_bound(reference.scalar_type());
  if (!found.defined()) {
    return failed_row(name, norm, bound, "no gradient arrived");
  }
  if (found.sizes() != reference.sizes()) {
    return failed_row(
        name, norm, bound, concat_text("shape ", found.sizes(), " instead of ", reference.sizes())
    );
  }
  const at::Tensor actual = flat_double(found);
  const double error = norm_of(actual - expected);
  const double scale = std::max(norm, floor);
  if (!std::isfinite(error)) {
    return failed_row(name, norm, bound, "not finite");
  }
  GradientRow row{.name = name, .reference_norm = norm, .bound = bound};
  row.relative_error = error == 0 ? 0 : scale == 0 ? kInfinity : error / scale;
  const double product = norm * norm_of(actual);
  row.cosine = product > 0 ? actual.dot(expected).item<double>() / product : error == 0 ? 1 : 0;
  row.passed = row.relative_error <= bound;
  return row;
}

std::string number_text(double value, const char* format) {
  char text[32];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

}  // namespace

double gradient_bound(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kDouble:
      return 1e-10;
    case c10::kFloat:
      return 1e-5;
    case c10::kHalf:
      return 1.0 / 256;
    case c10::kBFloat16:
      return 1.0 / 32;
    default:
      HS_FAIL(
          InvalidArgument,
          "plan: gradients of dtype ",
          c10::toString(dtype),
          " have no bound; expected float64, float32, float16 or bfloat16"
      );
  }
}

NamedGradients named_gradients(const torch::nn::Module& module) {
  NamedGradients gradients;
  for (const auto& item : module.named_parameters()) {
    if (item.value().grad().defined()) {
      gradients[item.key()] = item.value().grad().detach().clone();
    }
  }
  return gradients;
}

GradientReport compare_gradients(const NamedGradients& found, const NamedGradients& reference) {
  const at::NoGradGuard no_grad;
  const double floor = 1e-3 * typical_norm(reference);
  GradientReport report;
  for (const auto& [name, expected] : reference) {
    const auto at = found.find(name);
    report.rows.push_back(
        compare_one(name, at == found.end() ? at::Tensor() : at->second, expected, floor)
    );
  }
  std::stable_sort(report.rows.begin(), report.rows.end(), [](const auto& a, const auto& b) {
    return a.relative_error / a.bound > b.relative_error / b.bound;
  });
  report.passed = std::all_of(report.rows.begin(), report.rows.end(), [](const GradientRow& row) {
    return row.passed;
  });
  return report;
}

GradientReport gradient_equivalence(
    const AppliedPlan& applied, const NamedGradients& reference, double scale
) {
  const TrackingPause pause;
  NamedGradients found;
  for (const auto& item : reference) {
    const at::Tensor gradient = applied.full_parameter(item.first, /*gradient=*/true);
    if (gradient.defined()) {
      found[item.first] = gradient * scale;
    }
  }
  return compare_gradients(found, reference);
}

std::string to_text(const GradientReport& report) {
  std::size_t width = 9;
  for (const GradientRow& row : report.rows) {
    width = std::max(width, row.name.size());
  }
  const auto padded = [width](std::string text) {
    text.resize(width, ' ');
    return text;
  };
  std::string text = padded("parameter") + "  rel. error      cosine       bound\n";
  std::size_t num_failed = 0;
  for (const GradientRow& row : report.rows) {
    text += padded(row.name) + "  " + number_text(row.relative_error, "%10.3e") + "  " +
            number_text(row.cosine, "%10.7f") + "  " + number_text(row.bound, "%10.3e");
    text += (row.passed ? "" : "  FAILED") + (row.note.empty() ? "" : "  " + row.note) + "\n";
    num_failed += row.passed ? 0 : 1;
  }
  return text + (report.passed
                     ? concat_text("all ", report.rows.size(), " gradients are equal\n")
                     : concat_text(num_failed, " of ", report.rows.size(), " gradients differ\n"));
}

}  // namespace hypershard::plan
