// Saves and loads a training state: safetensors with logical names, each rank what it owns.
// Entries are logical element ranges, so a checkpoint knows no mesh: any number of ranks loads it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/comm/world.h"
#include "hypershard/optim/optimizer.h"
#include "hypershard/shard/fully_shard.h"

namespace hypershard::checkpoint {

/// What is saved beside tensors.
struct TrainState {
  std::int64_t step = 0;  ///< optimizer steps done
  std::uint64_t seed = 0;
  std::string config_toml = {};  ///< the resolved configuration
};

/// NOTE [checkpoint format]
///
/// `directory`/latest                 the name of the newest checkpoint, one line
/// `directory`/step-NNNNNNNN/         a whole checkpoint; `.tmp` behind it: unfinished, never read
///   manifest.json                    what is here: parameters, optimizer, files with checksums
///   weights-RRRRR.safetensors        what rank R wrote of the update parameters
///   optimizer-RRRRR.safetensors      the same of the optimizer's state
///
/// An entry is called by its parameter's logical name when it is whole, else `NAME@BEGIN:END`:
/// those elements of the flattened parameter, with the whole shape under `shape:NAME` in the file's
/// metadata. Where a plan cuts a parameter over other axes than data, `NAME[B:E,B:E]` is the part
/// with these indices, one range a dimension, and `NAME[B:E,B:E]@BEGIN:END` a range of its
/// flattened elements. State is called `exp_avg/NAME`. Parameters that were never stepped have no
/// state. The dtype is that of the update parameters. Padding is not saved, nor are module buffers
/// and parameters that fully_shard was told to ignore.

/// Writes `directory`/step-NNNNNNNN, beside it first and renamed when whole; then points
/// `directory`/latest at it. Returns the path. A checkpoint of the same step is replaced.
///
/// Each element of every logical parameter and of every optimizer state is written exactly once in
/// the job: where it is replicated, by the first of the ranks that hold it. All ranks must
/// see one file system. Collective: all ranks of the mesh. Errors: IoError on every rank, naming
/// the rank that failed, file and cause (disk full, permissions); the older checkpoint stays whole
/// and `latest` stays where it was. InvalidArgument if the optimizer belongs to another model.
std::string save(
    const std::string& directory,
    const shard::ShardedModel& model,
    optim::ShardedOptimizer* optimizer,
    const TrainState& state,
    const comm::ProcessMesh& mesh
);

/// Loads weights, and optimizer state if `optimizer` is given, from a checkpoint (a path that save
/// returned, or a directory whose `latest` is meant), saved on this or any other mesh.
///
/// Every file is verified by one rank; then each rank reads what it owns, straight to its place.
/// Floating values are converted where the update dtypes differ. Nothing is written before all
/// checks have passed on all ranks. Afterwards meta parameters count as initialised and the runtime
/// parameters are current.
/// Collective: all ranks of the mesh.
/// Errors: the same on every rank. IoError for missing, torn, altered or foreign files, naming
/// them. InvalidArgument listing missing, unexpected and mis-shaped entries, for the state of
/// another optimizer, or during a forward.
TrainState load(
    const std::string& path,
    const shard::ShardedModel& model,
    optim::ShardedOptimizer* optimizer,
    const comm::ProcessMesh& mesh
);

/// A logical tensor.
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// Reads whole logical parameters without a mesh, for sampling and export. Single process.
/// Errors: IoError as for load.
std::vector<NamedTensor> read_weights(const std::string& path);
/// Reads whole optimizer state, named `exp_avg/NAME`; empty if none was saved. Single process.
/// Errors: IoError as for load.
std::vector<NamedTensor> read_optimizer(const std::string& path);
/// Reads what was saved beside tensors. Errors: IoError as for load.
TrainState read_state(const std::string& path);

/// Returns the path of the checkpoint that `directory`/latest names; "" if there is no such file.
/// Errors: IoError if the file is damaged or names nothing that is there.
std::string find_latest(const std::string& directory);

/// Removes all but the newest `keep` checkpoints (0: keeps all), and what interrupted saves left.
/// Never removes the one that `latest` names. Returns the paths removed. To be called by one
/// process, between saves.
/// Errors: InvalidArgument if `keep` is negative; IoError if something cannot be removed.
std::vector<std::string> prune(const std::string& directory, int keep);

}  // namespace hypershard::checkpoint
