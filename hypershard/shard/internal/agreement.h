// Small questions that all ranks must answer alike before the engine relies on them.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/comm/communicator.h"

namespace hypershard::shard::internal {

/// Makes a fixed-size tensor that differs (but for hash collisions) when the lists differ.
at::Tensor order_signature(const std::vector<int>& order);

/// Tells whether a small integer tensor is the same on all ranks. Collective: ranks of
/// `communicator`.
bool equal_on_all_ranks(comm::Communicator& communicator, const at::Tensor& mine);

/// Gathers one int64 tensor a rank: the result has a row for each. Collective: ranks of
/// `communicator`.
at::Tensor gather_rows(comm::Communicator& communicator, const at::Tensor& mine);

}  // namespace hypershard::shard::internal
