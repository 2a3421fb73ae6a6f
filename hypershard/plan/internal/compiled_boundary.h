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
#include "hypershard/plan/whole_dimension.h"

namespace hypershard::plan::internal {

/// Runs one resolved boundary.
///
/// The shape that was resolved is compiled at once; others (a last batch, evaluation) when they
/// come, and the few newest are kept. NOTE [sizes of cuts]: a rank cannot tell from its piece how
/// large the whole is, and pieces of several wholes may be alike on one rank and not on another.
/// The boundary that cut the dimension knew, so its newest crossing is asked; what no boundary cut
/// has the size that was resolved if the piece has, else it counts as cut evenly.
class CompiledBoundary {
 public:
  /// Collective: all ranks of the mesh. `boundary` must outlive it.
  CompiledBoundary(const ResolvedBoundary& boundary, std::shared_ptr<const comm::ProcessMesh> mesh);
  /// Says which boundary cut a dimension of what arrives, and which dimension it was there.
  void set_origin(std::size_t dim, const CompiledBoundary* boundary, std::size_t dim_there);
  /// Returns what the program goes on with. Collective, in backward too. A moved-in tensor that
  /// nobody else holds may be written to.
  /// Errors: InvalidArgument for another number of dimensions than was resolved, and in backward
  /// for a gradient where none crossed when the plan was resolved; Unsupported under a
  /// WholeDimensionScope.
  at::Tensor cross(at::Tensor arriving);
  const ResolvedBoundary& boundary() const { return boundary_; }
  /// Shapes that are kept, the resolved one among them.
  static constexpr std::size_t kKept = 8;
  std::size_t num_compiled() const { return compiled_.size(); }

 private:
  struct Compiled {
    std::vector<std::int64_t> local;
    dtensor::Redistribution run;
  };
  struct Origin {
    const CompiledBoundary* boundary = nullptr;
    std::size_t dim = 0;
  };

  const dtensor::Redistribution& for_shape(at::IntArrayRef local);
  std::int64_t global_size(std::size_t dim, std::int64_t local) const;
  std::int64_t piece_of(const layout::Layout& layout, std::size_t dim, std::int64_t global) const;
  void check_whole(const WholeDimensionScope& scope) const;
  Compiled compile(std::vector<std::int64_t> local, std::vector<std::int64_t> global) const;

  const ResolvedBoundary& boundary_;
  std::shared_ptr<const comm::ProcessMesh> mesh_;
  std::vector<int> coordinates_;
  std::vector<Origin> origins_;       // by dimension of what arrives
  std::vector<std::int64_t> global_;  // shape of the newest crossing
  std::deque<Compiled> compiled_;  // newest first, but for the resolved one, which stays in front
};

}  // namespace hypershard::plan::internal
