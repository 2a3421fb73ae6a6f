// The global shape of a tensor from the parts that the ranks hold.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/comm/world.h"
#include "hypershard/layout/placement.h"

namespace hypershard::plan::internal {

/// Returns the communicator that validation keeps to itself. Collective on first use.
std::shared_ptr<comm::Communicator> validation_ranks(const comm::ProcessMesh& mesh);

/// Adds up the parts along cut dimensions. Collective: all ranks of `everyone`, which joins the
/// mesh's ranks in order, with tensors of equally many dimensions.
std::vector<std::int64_t> global_shape(
    at::IntArrayRef local,
    const layout::Layout& layout,
    const comm::ProcessMesh& mesh,
    comm::Communicator& everyone
);

}  // namespace hypershard::plan::internal
