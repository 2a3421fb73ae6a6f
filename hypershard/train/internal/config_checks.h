// Why: what must hold between keys, each reported at the key that the user would change.
// Not installed; the schema of run_config.h runs these after every key is good on its own.
#pragma once

#include "hypershard/core/config.h"
#include "hypershard/train/run_config.h"

namespace hypershard::train::internal {

/// Heads divide the width, and so on.
void check_model(const RunConfig& config, ConfigProblems& problems);
/// Paths are named and patterns are well formed.
void check_text(const RunConfig& config, ConfigProblems& problems);
/// No gradient passes through fp16.
void check_precision(const RunConfig& config, ConfigProblems& problems);
/// Warm-up ends before the run does; optimizer values fit each other.
void check_schedule(const RunConfig& config, ConfigProblems& problems);
/// Stated layouts name data axes, for all planes or for none, and lie inside one another.
void check_layouts(const StatedLayouts& layouts, ConfigProblems& problems);
/// Ready-made plans exist, and heads divide among the ranks that share a row.
void check_plan(const RunConfig& config, ConfigProblems& problems);
/// The mesh and the batch fit the number of ranks; 0 ranks: not known yet.
void check_world(const RunConfig& config, int world_size, ConfigProblems& problems);

/// Sizes of {replicate, shard}, or why they do not fit so many ranks (then `key` is the one to
/// change).
struct MeshSizes {
  int replicate = 1;
  int shard = 1;
  std::string problem = {};
  std::string key = {};
};
MeshSizes fit_mesh(const ParallelSection& parallel, int world_size);

}  // namespace hypershard::train::internal
