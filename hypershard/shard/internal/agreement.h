// Questions that all ranks must answer alike before the engine relies on them.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/comm/communicator.h"
#include "hypershard/comm/world.h"
#include "hypershard/shard/data_parallel.h"
#include "hypershard/shard/engine.h"
#include "hypershard/shard/options.h"

namespace hypershard::shard::internal {

/// Makes a fixed-size tensor that differs (but for hash collisions) when the lists differ.
at::Tensor order_signature(const std::vector<int>& order);

/// Tells whether a small integer tensor is the same on all ranks. Collective: ranks of
/// `communicator`.
bool equal_on_all_ranks(comm::Communicator& communicator, const at::Tensor& mine);
/// The same over the data axes and the plan axes. Collective: all ranks of the mesh.
bool equal_on_all_ranks(const DataParallel& parallel, const at::Tensor& mine);

/// Gathers one int64 tensor a rank: the result has a row for each. Collective: ranks of
/// `communicator`.
at::Tensor gather_rows(comm::Communicator& communicator, const at::Tensor& mine);

/// Throws unless all ranks were given the same options: others would start other collectives, and
/// hang or mix up gradients. Collective: all ranks of the mesh.
/// Errors: InvalidArgument naming the rank that differs.
void agree_on_options(
    const comm::ProcessMesh& mesh,
    const FullyShardOptions& options,
    const layout::PlaneLayouts& layouts
);

/// Throws unless all ranks have the same parameters, cut as their layouts say; and where ranks hold
/// the same part of one, the same values, or makes them so. Collective: all ranks of the mesh.
/// Errors: InvalidArgument naming the first parameter that differs, in what, and two ranks.
void agree_on_parameters(
    const std::vector<UnitSpec>& specs,
    const DataParallel& parallel,
    const comm::ProcessMesh& mesh,
    InitialValues how
);

}  // namespace hypershard::shard::internal
