// The last word on a plan: every parameter's gradient beside that of an unsharded step.
#pragma once

#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include "hypershard/plan/apply.h"

namespace torch::nn {
class Module;
}

namespace hypershard::plan {

/// One parameter of the comparison.
struct GradientRow {
  std::string name;
  double relative_error = 0;  ///< ||found - reference|| / ||reference||, see compare_gradients
  double cosine = 1;          ///< 1 where both are zero
  double reference_norm = 0;
  double bound = 0;  ///< of the gradient's dtype, or more beside an ExactReference
  bool passed = false;
  /// What else is wrong: missing, too many, another shape, not finite; or why the bound is larger.
  std::string note = {};
};

/// All parameters, worst first.
struct GradientReport {
  std::vector<GradientRow> rows;
  bool passed = false;
  bool is_exact = false;  ///< the reference was an ExactReference
};
/// Writes the table: path, relative error, cosine, bound, and the verdict.
std::string to_text(const GradientReport& report);

/// Returns the relative error up to which gradients count as equal.
///
/// fp64 1e-10 and fp32 1e-5 leave room for sums in another order, no more. bf16 and fp16 round each
/// product's result to 8 and 11 bits, in another grouping when sharded: bounds of 2^-5 and 2^-8.
/// Errors: InvalidArgument for other dtypes.
double gradient_bound(c10::ScalarType dtype);

/// Gradients by name.
using NamedGradients = std::map<std::string, at::Tensor>;

/// Copies the gradients of a module's parameters; parameters without one are left out.
NamedGradients named_gradients(const torch::nn::Module& module);

/// Compares whole gradients in fp64. The error is relative to the reference's norm, or to 1e-3 of
/// the typical norm of all (root mean square by parameter) where that is larger: a gradient that
/// should be zero has no scale of its own. A found gradient without a reference fails unless it is
/// zero, and so does a comparison of nothing.
GradientReport compare_gradients(const NamedGradients& found, const NamedGradients& reference);

/// One unsharded step in fp64 and in fp32: the gradients, and how far fp32 rounds them off.
struct ExactReference {
  NamedGradients gradients;  ///< fp64
  NamedGradients rounded;    ///< fp32, of the same weights and data; the same names
  /// Where a gradient was added up from parts without rounding: the sum of the norms of the addends
  /// as they count in it. A found gradient rounds at these additions.
  std::map<std::string, double> addends = {};
};

/// Compares fp32 gradients where an fp32 reference cannot tell rounding from a mistake: as
/// compare_gradients does, but beside the nearer of both references, with the bound of fp32 or,
/// where rounding is more than that, four times what it was measured to be, at most 5e-4: NOTE
/// [rounding of a reference] in the source.
/// Errors: InvalidArgument if the two references differ in names or shapes, or `rounded` is not
/// fp32.
GradientReport compare_with_exact(const NamedGradients& found, const ExactReference& reference);

/// Gathers all gradients under a plan, times `scale`, and compares them with `reference`, those of
/// an unsharded step on the same data, under the same names.
///
/// Gradients must be final: reduced over data axes too (`scale` turns their sum into a mean).
/// Collective: all ranks of the plan's mesh; each gets the same report.
/// Errors: InvalidArgument for a name that the plan does not have; CommError.
GradientReport gradient_equivalence(
    const AppliedPlan& applied, const NamedGradients& reference, double scale = 1
);

}  // namespace hypershard::plan
