// A boundary in production: redistributions of plain tensors, compiled by shape.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/comm/world.h"
#include "hypershard/dtensor/redistribute.h"
#include "hypershard/plan/resolved_plan.h"

namespace hypershard::plan::internal {

/// Runs one resolved boundary.
///
/// The shape that was resolved is compiled at once; others (a last batch, evaluation) when they
/// come, and the few newest are kept.
///
/// NOTE [sizes of other shapes]: a rank knows the size of its part only. A cut dimension whose part
/// is as long as it was when the plan was resolved has the resolved size; any other counts as cut
/// evenly. So that all ranks come to the same size, a boundary that cuts (or cuts anew) a dimension
/// of another size refuses what is uneven, and what some rank would take for the resolved size.
class CompiledBoundary {
 public:
  /// Collective: all ranks of the mesh. `boundary` must outlive it.
  CompiledBoundary(const ResolvedBoundary& boundary, std::shared_ptr<const comm::ProcessMesh> mesh);
  /// Returns what the program goes on with. Collective, in backward too. A moved-in tensor that
  /// nobody else holds may be written to.
  /// Errors: Unsupported for sizes that the note refuses, the same on all ranks of the cut; in
  /// backward InvalidArgument for a gradient where none crossed when the plan was resolved.
  at::Tensor cross(at::Tensor arriving);
  const ResolvedBoundary& boundary() const { return boundary_; }
  std::size_t num_compiled() const { return compiled_.size(); }

 private:
  struct Compiled {
    std::vector<std::int64_t> local;
    dtensor::Redistribution run;
  };
  static constexpr std::size_t kKept = 8;

  const dtensor::Redistribution& for_shape(at::IntArrayRef local);
  Compiled compile(std::vector<std::int64_t> local, std::vector<std::int64_t> global) const;
  std::vector<std::int64_t> global_shape(at::IntArrayRef local) const;
  void check_cuts(const std::vector<std::int64_t>& global) const;
  std::int64_t num_pieces(const layout::Layout& layout, int dim) const;

  const ResolvedBoundary& boundary_;
  std::shared_ptr<const comm::ProcessMesh> mesh_;
  std::deque<Compiled> compiled_;  // newest first, but for the resolved one, which stays in front
};

}  // namespace hypershard::plan::internal
