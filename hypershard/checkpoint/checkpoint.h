// Saves and loads a training state: safetensors with logical names, each rank what it owns.
// Part one of the format: enough to sample and to resume on the same mesh; entries are logical element ranges, so that resharding can follow in the same files.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "hypershard/comm/world.h"
#include "hypershard/optim/optimizer.h"
#include "hypershard/shard/fully_shard.h"

namespace hypershard::checkpoint {

/// What is saved beside tensors.
struct TrainState {
  std::int64_t step = 0;    ///< optimizer steps done
  std::uint64_t seed = 0;
  std::string config_toml;  ///< the resolved configuration
};

/// Writes `directory`/step-NNNNNNNN, beside it first and renamed when whole; then points `directory`/latest at it. Returns the path.
///
/// Each element of every logical parameter and of every optimizer state is written exactly once in the job.
/// Collective: all ranks of the mesh.
/// Errors: IoError naming file and cause (disk full, permissions) on every rank; the older checkpoint stays whole.
std::string save(
    const std::string& directory, const shard::ShardedModel& model, optim::ShardedOptimizer* optimizer, const TrainState& state, const comm::ProcessMesh& mesh
);

/// Loads weights, and optimizer state if `optimizer` is given, from a checkpoint (a path that save returned, or a directory whose `latest` is meant).
///
/// Collective: all ranks of the mesh.
/// Errors: IoError for missing, torn or foreign files; InvalidArgument listing missing, unexpected and mis-shaped entries, or a mesh other than the one saved where that matters.
TrainState load(const std::string& path, const shard::ShardedModel& model, optim::ShardedOptimizer* optimizer, const comm::ProcessMesh& mesh);

/// Reads whole logical tensors without a mesh, for sampling and export. Single process.
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};
std::vector<NamedTensor> read_weights(const std::string& path);
TrainState read_state(const std::string& path);

}  // namespace hypershard::checkpoint
