// Gives a model's parameters this rank's shapes for the time of one run.
#pragma once

#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/layout/mesh.h"
#include "hypershard/plan/internal/row_parts.h"
#include "hypershard/plan/match.h"

namespace hypershard::plan::internal {

/// While alive, parameters and buffers that the plan shards have their local shape and hold zeros.
/// All handles of a parameter see it, since the TensorImpl stays.
class LocalShapes {
 public:
  LocalShapes(
      const std::vector<MatchedParameter>& parameters, const layout::DeviceMesh& mesh, int rank
  );
  ~LocalShapes();
  LocalShapes(const LocalShapes&) = delete;
  LocalShapes& operator=(const LocalShapes&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> changed_;  // handle, what it held
  RowParts parts_;                                          // without communicators
};

}  // namespace hypershard::plan::internal
