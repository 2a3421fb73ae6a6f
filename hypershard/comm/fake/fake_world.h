// Why: plans are made for worlds that are not here: a fake world answers who belongs to which
// group, moves nothing, and keeps the log and the byte counts.
#pragma once

#include <memory>

#include "hypershard/comm/world.h"
#include "hypershard/layout/topology.h"

namespace hypershard::comm {

/// What a fake world pretends.
struct FakeOptions {
  /// Groups inside a supernode offer shared memory, which is private memory here, with pages only
  /// where it is written to.
  bool shared_memory = true;
};

/// Makes the view of `rank` of a job of topology.world_size() ranks, of which none runs.
///
/// Collectives are validated and logged, complete at once and write nothing; tensors may be meta
/// tensors. Epochs are always reached. Log and bytes are those of a real run of the same calls.
/// Errors: InvalidArgument if `rank` is out of range.
std::shared_ptr<World> make_fake_world(
    int rank, layout::Topology topology, const FakeOptions& options = {}
);

}  // namespace hypershard::comm
