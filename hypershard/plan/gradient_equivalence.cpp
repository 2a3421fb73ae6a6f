// See gradient_equivalence.h.
#include "hypershard/plan/gradient_equivalence.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <optional>
#include <set>
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

// A gradient that the unsharded step does not have; none if it is all zeros, as a skipped part's.
std::optional<GradientRow> surplus_row(const std::string& name, const at::Tensor& found) {
  const double norm = norm_of(flat_double(found));
  if (norm == 0) {
    return std::nullopt;
  }
  return failed_row(
      name,
      0,
      gradient_bound(found.scalar_type()),
      concat_text("norm ", norm, ", but none in the unsharded step")
  );
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
  for (const auto& [name, gradient] : found) {
    if (!reference.contains(name)) {
      if (auto row = surplus_row(name, gradient)) {
        report.rows.push_back(std::move(*row));
      }
    }
  }
  std::stable_sort(report.rows.begin(), report.rows.end(), [](const auto& a, const auto& b) {
    return a.relative_error / a.bound > b.relative_error / b.bound;
  });
  report.passed = !report.rows.empty() &&
                  std::all_of(report.rows.begin(), report.rows.end(), [](const GradientRow& row) {
                    return row.passed;
                  });
  return report;
}

GradientReport gradient_equivalence(
    const AppliedPlan& applied, const NamedGradients& reference, double scale
) {
  const TrackingPause pause;
  std::set<std::string> names;
  for (const auto& item : reference) {
    names.insert(item.first);
  }
  for (const ResolvedParameter& parameter : applied.resolved().parameters) {
    const auto is_known = [&](const std::string& name) { return reference.contains(name); };
    const bool has_reference =
        is_known(parameter.name) ||
        std::any_of(parameter.aliases.begin(), parameter.aliases.end(), is_known);
    if (!parameter.is_buffer && !has_reference) {
      names.insert(parameter.name);
    }
  }
  NamedGradients found;
  for (const std::string& name : names) {
    const at::Tensor gradient = applied.full_parameter(name, /*gradient=*/true);
    if (gradient.defined()) {
      found[name] = gradient * scale;
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
  return text + (report.passed ? concat_text("all ", report.rows.size(), " gradients are equal\n")
                 : report.rows.empty()
                     ? std::string("there are no gradients to compare\n")
                     : concat_text(num_failed, " of ", report.rows.size(), " gradients differ\n"));
}

}  // namespace hypershard::plan
