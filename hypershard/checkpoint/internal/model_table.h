// Why: save and load look at a sharded model in one way: logical parameters, and the pieces of them
// that this rank owns.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/checkpoint/internal/manifest.h"
#include "hypershard/layout/block.h"
#include "hypershard/optim/optimizer.h"
#include "hypershard/shard/fully_shard.h"

namespace hypershard::checkpoint::internal {

/// A part of a logical tensor in this rank's memory.
struct OwnedPiece {
  std::string prefix;    ///< `exp_avg/` for state, empty for weights
  std::string name;      ///< of the parameter, in the model
  layout::Block block;   ///< of the whole: what its rank's local tensor is, often all
  layout::Range range;   ///< of the flattened block
  at::Tensor flat;       ///< 1-D, range.numel() elements, shares the plane's memory
  bool is_first = true;  ///< no earlier rank on the plan axes holds it: to be saved here

  std::string key() const { return prefix + name; }
};

/// Lists the logical parameters of a model in its order; no optimizer columns.
std::vector<SavedParameter> list_parameters(const shard::ShardedModel& model);

/// Lists this rank's pieces of the weights.
std::vector<OwnedPiece> weight_pieces(const std::vector<shard::UpdateTensor>& updates);
/// Lists this rank's pieces of the optimizer's state.
/// Errors: InvalidArgument if the state does not lie like the update tensors.
std::vector<OwnedPiece> state_pieces(
    const std::vector<shard::UpdateTensor>& updates, const std::vector<optim::StateTensor>& state
);

/// Tells whether this rank writes what it owns: it has coordinate 0 on every data axis along which
/// the update plane is replicated. On the plan axes that is a question of each piece.
bool is_writer(const shard::ShardedModel& model);

/// How a model's parameters and a checkpoint's fit together.
struct Match {
  std::vector<std::size_t> saved_of;    ///< by model parameter; meaningless if anything is wrong
  std::vector<std::string> missing;     ///< the model has it, the checkpoint does not
  std::vector<std::string> unexpected;  ///< the other way
  std::vector<std::string> different;   ///< other shape, kind of dtype or tying, with both values
};

/// Matches parameters by any of their names.
Match match_parameters(
    const std::vector<SavedParameter>& model, const std::vector<SavedParameter>& saved
);

/// Writes the first ten of a list and how many more there are.
std::string list_text(const std::vector<std::string>& items);

}  // namespace hypershard::checkpoint::internal
