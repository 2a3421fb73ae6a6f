// Which boundary of a running forward cut a dimension: there the global size is known.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "hypershard/layout/mesh.h"
#include "hypershard/layout/tensor_spec.h"
#include "hypershard/plan/resolved_plan.h"

namespace hypershard::plan::internal {

/// The cuts that boundaries made so far. `mesh` must outlive it. Threads: not thread-safe.
class KnownCuts {
 public:
  explicit KnownCuts(const layout::DeviceMesh& mesh) : mesh_(mesh) {}

  /// Notes what boundary `number` cuts when it takes a tensor to another layout.
  void note(int number, const layout::TensorSpec& arriving, const layout::Layout& leaving);
  /// Returns by dimension who cut it: the newest boundary that cut a dimension of this size over
  /// the same axes, one that cut it in its place before others (it may have changed places since).
  std::vector<CutOrigin> origins(const layout::TensorSpec& spec) const;

 private:
  struct Cut {
    std::vector<int> axes;
    std::int64_t size = 0;
    CutOrigin origin;
  };

  std::vector<int> axes_of(const layout::Layout& layout, std::size_t dim) const;

  const layout::DeviceMesh& mesh_;
  std::vector<Cut> cuts_;  // newest last
};

}  // namespace hypershard::plan::internal
