// What a rank's local tensor is a part of, where a plan cuts parameters over mesh axes that are no
// data axes (tensor, sequence, vocabulary parallelism). To the planes it is a plain tensor; norms,
// checkpoints, initial values and whole parameters need to know more.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/comm/communicator.h"
#include "hypershard/layout/block.h"
#include "hypershard/layout/strategy.h"
#include "hypershard/shard/options.h"

namespace hypershard::shard {

/// Which part of a logical parameter the module's own tensor is on this rank.
///
/// NOTE [plan axes]: the mesh axes that are no data axes, those of size 1 left out. A parameter is
/// cut over them by dimensions first; what is left on a rank is cut flat over the data axes. So all
/// collectives of the planes stay among ranks that hold the same part; only a gradient that is
/// Partial on a plan axis is summed there too, after its data axes, on the slice that they leave.
struct ParameterPart {
  layout::Block block;
  /// What each rank of the plan axes holds, by rank of their communicator; empty: all the whole.
  std::vector<layout::Block> of_ranks;
  /// No rank before this one on the plan axes holds the same part: this copy is counted and saved.
  bool is_first = true;
  std::vector<std::string> reduce_axes;  ///< plan axes over which its gradient is summed
};

/// Lists the plan axes of a mesh, in its order; see NOTE [plan axes].
std::vector<std::string> find_plan_axes(
    const layout::DeviceMesh& mesh, const layout::DataAxes& data_axes
);

/// Finds a parameter's part on `rank`; `given` null: the local tensor is the whole.
/// Errors: InvalidArgument naming the parameter and the axis: a layout that does not fit the mesh
/// or the local shape, cuts over a data axis, is Partial, or a sum over an axis that is a data axis
/// or over which the parameter is cut.
ParameterPart find_part(
    const std::string& name,
    std::span<const std::int64_t> local_shape,
    const ParameterSpec* given,
    const layout::DeviceMesh& mesh,
    const layout::DataAxes& data_axes,
    int rank
);

/// Puts the parts of all ranks together. Returns a new tensor, or `local` if that is the whole.
///
/// Shapes: local as part.block; result the global shape. Collective: `ranks`, those of the plan
/// axes; null if there are none.
at::Tensor join_parts(
    const at::Tensor& local,
    const ParameterPart& part,
    comm::Communicator* ranks,
    const std::string& name
);

}  // namespace hypershard::shard
