// Why: what a configuration will do is worth knowing before hours are spent: which units, which
// bytes over which links, which memory. Planned by the engine itself, on ranks that do not exist.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hypershard/comm/collective_log.h"
#include "hypershard/layout/mesh.h"
#include "hypershard/layout/strategy.h"
#include "hypershard/plan/resolved_plan.h"
#include "hypershard/train/run_config.h"

namespace hypershard::train {

/// Memory that a group takes on one rank for as long as the run lasts. Units: bytes.
struct GroupMemory {
  std::int64_t runtime = 0;         ///< sharded or resident runtime parameters
  std::int64_t shared_runtime = 0;  ///< whole parameters, once for all ranks of a supernode
  std::int64_t update = 0;          ///< update parameters, where they are apart from runtime
  std::int64_t optimizer = 0;       ///< optimizer state
  std::int64_t gradients = 0;       ///< reduced gradients

  bool operator==(const GroupMemory&) const = default;
};

/// One group of a unit. Sizes of the whole group, in elements.
struct GroupPlan {
  std::string name;
  int num_params = 0;
  std::int64_t numel = 0;  ///< with padding
  std::int64_t padding = 0;
  double imbalance = 1;                          ///< the largest share of a rank over the mean
  std::string storage, compute, reduce, update;  ///< dtypes
  std::string runtime;                           ///< shared, gathered or resident
  GroupMemory memory = {};
};

/// One unit.
struct UnitPlan {
  std::string path;
  std::vector<GroupPlan> groups;
  bool reshards = false;  ///< between its forward and its backward
};

/// When in a step something is communicated.
enum class Phase : std::uint8_t { kForward, kBackward, kReduce, kPublish };
std::string to_text(Phase phase);

/// One collective of one step, as the rank's log will show it.
struct PlannedCollective {
  Phase phase = Phase::kForward;
  comm::Op op = comm::Op::kAllGather;
  std::string axis;  ///< the communicator's name
  layout::Tier tier = layout::Tier::kIntra;
  std::string unit;
  std::int64_t payload_bytes = 0;
  std::int64_t sent_bytes = 0;  ///< as its communicator will count them
};

/// Memory of one rank that does not depend on the batch. Units: bytes.
struct MemoryPlan {
  std::int64_t runtime = 0;         ///< sharded or resident runtime parameters
  std::int64_t shared_runtime = 0;  ///< whole parameters, once for all ranks of a supernode
  std::int64_t shared_unsharded =
      0;                       ///< most that is whole at once, once for all ranks of a supernode
  std::int64_t unsharded = 0;  ///< the same in buffers of this rank
  std::int64_t gradient_buffers = 0;  ///< whole gradients of the units under way
  std::int64_t gradients = 0;         ///< reduced gradients
  std::int64_t update = 0;            ///< update parameters, where they are apart from runtime
  std::int64_t optimizer = 0;         ///< optimizer state

  /// Returns the sum without what is shared.
  std::int64_t own() const {
    return runtime + unsharded + gradient_buffers + gradients + update + optimizer;
  }
};

/// Everything that follows from a configuration, for one rank of so many.
struct RunPlan {
  explicit RunPlan(layout::DeviceMesh on) : mesh(std::move(on)) {}

  int rank = 0;
  layout::DeviceMesh mesh;
  layout::PlaneLayouts layouts;
  std::string strategy;
  std::int64_t parameters = 0;
  double flops_per_token = 0;
  std::int64_t tokens_per_step = 0;
  std::vector<UnitPlan> units;
  std::string why_not_shared;                  ///< empty if all runtime parameters are
  std::vector<PlannedCollective> collectives;  ///< of a step in the middle of a run
  bool measures_buckets = false;  ///< a run chooses buckets by its link; here a unit is a bucket
  std::optional<plan::ResolvedPlan> resolved;  ///< with a plan: every boundary, cuts, reductions
  std::vector<PlannedCollective> crossings;    ///< of boundaries and loss in a step
  MemoryPlan memory;
};

/// Returns the topology that `parallel.supernodes` describes for ranks that are not here.
layout::Topology planned_topology(const RunConfig& config, int world_size);

/// Plans a run for one rank. Needs no memory for weights, data or peers.
/// Errors: InvalidArgument, Unsupported as a real run would give.
RunPlan plan_run(const RunConfig& config, std::int64_t vocab_size, int world_size, int rank = 0);

/// Writes the plan as a report for a terminal.
std::string describe(const RunPlan& plan);

}  // namespace hypershard::train
