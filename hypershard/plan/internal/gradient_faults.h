// Words for what the reverse pass finds; shared by resolving and validation.
#pragma once

#include <string>
#include <vector>

#include "hypershard/layout/mesh.h"
#include "hypershard/plan/gradient_layouts.h"
#include "hypershard/plan/layout_error.h"
#include "hypershard/plan/resolved_plan.h"
#include "hypershard/plan/tracker.h"

namespace hypershard::plan::internal {

/// Describes a conflict by both uses of the value.
LayoutFault conflict_fault(
    const LayoutTracker& tracker, const Tape& tape, const GradientConflict& conflict
);

/// Lists what is wrong with differentiating `outputs`: a result that is Partial(avg) on an axis
/// that is no data axis of `plan`, whose gradient would come out too large, or Partial(max|min) on
/// any.
std::vector<LayoutFault> seed_faults(
    const LayoutTracker& tracker,
    const std::vector<layout::TensorSpec>& outputs,
    const ResolvedPlan& plan
);

}  // namespace hypershard::plan::internal
