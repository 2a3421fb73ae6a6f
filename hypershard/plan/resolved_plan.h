// What resolving a plan finds: every boundary with both sides, every parameter with its gradient.
// Plain data: what production installs, what validation checks against, what a report prints.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hypershard/layout/mesh.h"
#include "hypershard/layout/placement.h"
#include "hypershard/layout/redistribution.h"
#include "hypershard/layout/tensor_spec.h"
#include "hypershard/plan/layout_error.h"
#include "hypershard/plan/match.h"

namespace hypershard::plan {

/// One direction of a boundary. Units: bytes, of the rank that resolved.
struct BoundaryFlow {
  layout::Layout arriving = {};
  layout::Layout leaving = {};
  std::vector<layout::RedistributionStep> steps = {};  ///< empty: nothing to do
  std::int64_t sent_bytes = 0;
  std::int64_t received_bytes = 0;
};

/// Where a dimension that arrives cut was cut: there its global size is known, on every rank.
struct CutOrigin {
  int boundary = -1;  ///< number in ResolvedPlan::boundaries; -1: no boundary cut it
  int dim = 0;        ///< of the tensor there
};

/// A place where the plan names what crosses.
struct ResolvedBoundary {
  BoundarySite site = {};
  std::vector<std::int64_t> shape = {};  ///< global, at the resolved run
  std::string dtype = {};                ///< as libtorch writes it, e.g. `Float`
  BoundaryFlow forward = {};
  std::optional<BoundaryFlow> backward = {};  ///< none: no gradient crosses
  int crossings = 0;                          ///< in one forward; 0: the module did not run
  std::vector<CutOrigin> cut_by = {};         ///< by dimension of what arrives

  /// Tells whether nothing has to happen in either direction.
  bool is_identity() const {
    return forward.steps.empty() && (!backward.has_value() || backward->steps.empty());
  }
};

/// A parameter or buffer under the plan.
struct ResolvedParameter {
  std::string name = {};
  std::vector<std::string> aliases = {};
  layout::TensorSpec spec = {};
  bool is_buffer = false;
  bool is_trained = false;                      ///< requires a gradient
  std::optional<layout::Layout> gradient = {};  ///< as backward leaves it; none: none reaches it
  std::vector<std::string> reduce_axes = {};  ///< the plan's: Partial there, reduced after backward
  std::vector<std::string> data_axes = {
  };  ///< Partial there as well, left to the data-parallel side
};

/// The whole result, of one rank. Layouts, steps and axes are equal on all ranks; bytes may differ.
struct ResolvedPlan {
  std::vector<layout::MeshAxis> axes;        ///< of the mesh that it was resolved for
  std::vector<ResolvedBoundary> boundaries;  ///< in the order of the plan's sites
  std::vector<ResolvedParameter> parameters;
  std::vector<std::optional<layout::Layout>> inputs;  ///< of the model's arguments, in hook order
  std::vector<layout::TensorSpec> outputs;            ///< of the forward that was run
  std::vector<std::string> data_axes;
  std::vector<LayoutFault> problems;  ///< empty unless resolving was asked to collect them
  bool is_complete = true;  ///< false: after the problems the model could not run to its end

  bool is_data_axis(std::string_view axis) const;
  /// Returns the parameter of this name or alias, or null.
  const ResolvedParameter* find_parameter(const std::string& name) const;
};

/// Writes boundaries, sharded parameters and reductions as a report.
std::string to_text(const ResolvedPlan& plan, const layout::DeviceMesh& mesh);

}  // namespace hypershard::plan
