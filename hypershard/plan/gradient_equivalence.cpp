// See gradient_equivalence.h.
#include "hypershard/plan/gradient_equivalence.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
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

// NOTE [rounding of a reference]: where the terms of a gradient cancel, fp32 leaves fewer digits of
// it than gradient_bound asks for, on one rank as on many. How many is measured: rounding is
// ||fp32 reference - fp64 reference||, plus a last bit of each addend where the reference was added
// up in fp64, which a found gradient is not. The found gradient is another sample of the same
// roundings, the same operators in another order and grouping: as far from the fp64 reference,
// within a factor of two over many elements, and of two again for partial sums that have a bit more
// than the whole. Together four. If it came out of the same kernels on the same rows, it shares
// roundings with the fp32 reference and is nearer to that one than either is to the fp64 one: the
// nearer of both counts. A gradient that lacks a part, or has one twice, is off by that part, which
// has nothing to do with rounding; and off by a thousandth it is refused whatever fp32 left of it.
constexpr double kRoundings = 4;
constexpr double kLargestBound = 5e-4;

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

// How far a gradient may be off, and why that far.
struct Allowance {
  double bound = 0;
  std::string note = {};
};

GradientRow compare_one(
    const std::string& name,
    const at::Tensor& found,
    const at::Tensor& reference,
    double scale,
    Allowance allowed
) {
  const at::Tensor expected = flat_double(reference);
  const double norm = norm_of(expected);
  if (!found.defined()) {
    return failed_row(name, norm, allowed.bound, "no gradient arrived");
  }
  if (found.sizes() != reference.sizes()) {
    return failed_row(
        name,
        norm,
        allowed.bound,
        concat_text("shape ", found.sizes(), " instead of ", reference.sizes())
    );
  }
  const at::Tensor actual = flat_double(found);
  const double error = norm_of(actual - expected);
  if (!std::isfinite(error)) {
    return failed_row(name, norm, allowed.bound, "not finite");
  }
  GradientRow row{
      .name = name, .reference_norm = norm, .bound = allowed.bound, .note = std::move(allowed.note)
  };
  row.relative_error = error == 0 ? 0 : scale == 0 ? kInfinity : error / scale;
  const double product = norm * norm_of(actual);
  row.cosine = product > 0 ? actual.dot(expected).item<double>() / product : error == 0 ? 1 : 0;
  row.passed = row.relative_error <= row.bound;
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

// Lays one gradient, undefined if there is none, beside its reference; errors are relative to
// `scale`.
using Compare = std::function<GradientRow(
    const std::string& name, const at::Tensor& found, const at::Tensor& reference, double scale
)>;

GradientReport compare_all(
    const NamedGradients& found, const NamedGradients& reference, const Compare& compare
) {
  const at::NoGradGuard no_grad;
  const double floor = 1e-3 * typical_norm(reference);
  GradientReport report;
  for (const auto& [name, expected] : reference) {
    const auto at = found.find(name);
    const double scale = std::max(norm_of(flat_double(expected)), floor);
    report.rows.push_back(
        compare(name, at == found.end() ? at::Tensor() : at->second, expected, scale)
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

// Returns the rounded gradient that belongs to an exact one.
const at::Tensor& rounded_gradient(
    const ExactReference& reference, const std::string& name, const at::Tensor& exact
) {
  const auto at = reference.rounded.find(name);
  HS_CHECK(
      at != reference.rounded.end() && at->second.sizes() == exact.sizes() &&
          at->second.scalar_type() == c10::kFloat,
      "plan: an exact reference has a gradient of '",
      name,
      "' of shape ",
      exact.sizes(),
      " in fp64, but in fp32 ",
      at == reference.rounded.end()
          ? std::string("none")
          : concat_text(
                "one of ", at->second.sizes(), ' ', c10::toString(at->second.scalar_type())
            ),
      " (expected both of one step)"
  );
  return at->second;
}

// See NOTE [rounding of a reference].
Allowance allow_rounding(
    const ExactReference& reference,
    const std::string& name,
    const at::Tensor& exact,
    const at::Tensor& rounded,
    double scale
) {
  const auto addends = reference.addends.find(name);
  const double last_bits = addends == reference.addends.end()
                               ? 0
                               : addends->second * std::numeric_limits<float>::epsilon();
  const double rounding = norm_of(flat_double(rounded) - flat_double(exact)) + last_bits;
  const double bound = gradient_bound(c10::kFloat);
  const double wanted = scale > 0 ? kRoundings * rounding / scale : 0;
  if (!(wanted > bound)) {  // nor where it is not a number
    return {.bound = bound};
  }
  return {
      .bound = std::min(wanted, kLargestBound),
      .note = "fp32 rounds by " + number_text(rounding / scale, "%.1e")
  };
}

GradientRow compare_with_both(
    const ExactReference& reference,
    const std::string& name,
    const at::Tensor& found,
    const at::Tensor& exact,
    double scale
) {
  const at::Tensor& rounded = rounded_gradient(reference, name, exact);
  const Allowance allowed = allow_rounding(reference, name, exact, rounded, scale);
  GradientRow beside_exact = compare_one(name, found, exact, scale, allowed);
  GradientRow beside_rounded = compare_one(name, found, rounded, scale, allowed);
  return beside_rounded.relative_error < beside_exact.relative_error ? beside_rounded
                                                                     : beside_exact;
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
  return compare_all(
      found,
      reference,
      [](const std::string& name, const at::Tensor& own, const at::Tensor& expected, double scale) {
        return compare_one(
            name, own, expected, scale, {.bound = gradient_bound(expected.scalar_type())}
        );
      }
  );
}

GradientReport compare_with_exact(const NamedGradients& found, const ExactReference& reference) {
  HS_CHECK_EQ(
      reference.gradients.size(),
      reference.rounded.size(),
      "plan: gradients of an exact reference in fp64 and in fp32"
  );
  GradientReport report = compare_all(
      found,
      reference.gradients,
      [&](const std::string& name, const at::Tensor& own, const at::Tensor& exact, double scale) {
        return compare_with_both(reference, name, own, exact, scale);
      }
  );
  report.is_exact = true;
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
  const char* judge = report.is_exact ? ", judged beside a reference in fp64\n" : "\n";
  if (report.rows.empty()) {
    return text + "there are no gradients to compare\n";
  }
  return text +
         (report.passed
              ? concat_text("all ", report.rows.size(), " gradients are equal", judge)
              : concat_text(num_failed, " of ", report.rows.size(), " gradients differ", judge));
}

}  // namespace hypershard::plan
