// Why: see run_plan.h. The engine is built over a fake world; what it would do in a step follows
// from the groups that it made. A test compares with the log of a real step.
#include "hypershard/train/run_plan.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "hypershard/comm/fake/fake_world.h"
#include "hypershard/core/error.h"
#include "hypershard/model/gpt.h"
#include "hypershard/plan/parameter_specs.h"
#include "hypershard/shard/engine.h"
#include "hypershard/shard/fully_shard.h"
#include "hypershard/train/internal/boundary_traffic.h"
#include "hypershard/train/internal/ghost_memory.h"
#include "hypershard/train/run_layout.h"
#include "hypershard/train/session.h"

namespace hypershard::train {
namespace {

std::int64_t item_bytes(c10::ScalarType dtype) {
  return static_cast<std::int64_t>(c10::elementSize(dtype));
}

// Adds up what the engine's structure implies.
class Planner {
 public:
  Planner(const RunConfig& config, const shard::Engine& engine, const layout::DeviceMesh& mesh)
      : config_(config), engine_(engine), mesh_(mesh) {}

  void fill(RunPlan& plan);

 private:
  const shard::DataParallel& parallel() const { return engine_.parallel(); }
  UnitPlan plan_unit(const shard::Unit& unit) const;
  void add_step(std::vector<PlannedCollective>& out) const;
  void add_gathers(
      std::vector<PlannedCollective>& out,
      Phase phase,
      const shard::ParamGroup& group,
      int from_level,
      int to_level
  ) const;
  void add_unshard(std::vector<PlannedCollective>& out, Phase phase, const shard::Unit& unit) const;
  /// Where in the list the crossings of one backward are, by what goes together.
  using Crossings = std::map<std::string, std::size_t>;
  void add_reduce(
      std::vector<PlannedCollective>& out,
      Crossings& crossings,
      const shard::Unit& unit,
      bool crosses_replicas
  ) const;
  void add_crossing(
      std::vector<PlannedCollective>& out,
      Crossings& crossings,
      const shard::Unit& unit,
      const shard::ParamGroup& group,
      int level
  ) const;
  void add(
      std::vector<PlannedCollective>& out,
      Phase phase,
      comm::Op op,
      const shard::DataAxis& axis,
      const std::string& communicator,
      const std::string& unit,
      std::int64_t bytes
  ) const;
  bool has_outer_reduction() const;
  void add_plan_reduce(std::vector<PlannedCollective>& out, const shard::ParamGroup& group) const;
  MemoryPlan plan_memory() const;
  std::int64_t gradient_buffer_bytes() const;
  std::int64_t slice_bytes() const;
  bool uses_up_gradients(const shard::ParamGroup& group) const;
  std::int64_t unsharded_bytes() const;

  const RunConfig& config_;
  const shard::Engine& engine_;
  const layout::DeviceMesh& mesh_;
};

void Planner::fill(RunPlan& plan) {
  for (const auto& unit : engine_.units()) {
    plan.units.push_back(plan_unit(*unit));
  }
  plan.why_not_shared = engine_.why_not_shared();
  add_step(plan.collectives);
  plan.memory = plan_memory();
}

UnitPlan Planner::plan_unit(const shard::Unit& unit) const {
  UnitPlan plan{.path = unit.path(), .groups = {}, .reshards = unit.reshard_after_forward};
  for (const auto& group : unit.groups()) {
    const shard::GroupDtypes& dtypes = group->dtypes();
    plan.groups.push_back(
        {.name = group->name(),
         .num_params = static_cast<int>(group->params().size()),
         .numel = group->packing().numel,
         .padding = group->packing().padding_numel(),
         .imbalance = group->packing().imbalance(),
         .storage = dtype_word(dtypes.storage),
         .compute = dtype_word(dtypes.compute),
         .reduce = dtype_word(dtypes.reduce),
         .update = dtype_word(dtypes.update),
         .runtime = to_text(group->mode())}
    );
  }
  return plan;
}

void Planner::add(
    std::vector<PlannedCollective>& out,
    Phase phase,
    comm::Op op,
    const shard::DataAxis& axis,
    const std::string& communicator,
    const std::string& unit,
    std::int64_t bytes
) const {
  // A rank passes on all but its own part: once for a gather or a scatter, twice for an all-reduce.
  const std::int64_t once = bytes - bytes / axis.size;
  const std::vector<std::string> names = {axis.name};
  out.push_back(
      {.phase = phase,
       .op = op,
       .axis = communicator,
       .tier = mesh_.tier(names),
       .unit = unit,
       .payload_bytes = bytes,
       .sent_bytes = op == comm::Op::kAllReduce ? 2 * once : once}
  );
}

void Planner::add_gathers(
    std::vector<PlannedCollective>& out,
    Phase phase,
    const shard::ParamGroup& group,
    int from_level,
    int to_level
) const {
  for (int level = from_level - 1; level >= to_level; --level) {
    const shard::DataAxis& axis = parallel().cuts[static_cast<std::size_t>(level)];
    if (axis.size > 1) {
      const auto coords = parallel().coordinates(level);
      const std::int64_t bytes =
          group.packing().range(coords).numel() * item_bytes(group.dtypes().storage);
      add(out, phase, comm::Op::kAllGather, axis, axis.gather->info().name, group.unit(), bytes);
    }
  }
}

void Planner::add_unshard(std::vector<PlannedCollective>& out, Phase phase, const shard::Unit& unit)
    const {
  for (const auto& group : unit.groups()) {
    if (group->mode() == shard::RuntimeMode::kGathered) {
      add_gathers(out, phase, *group, parallel().runtime_levels, 0);
    }
  }
}

void Planner::add_reduce(
    std::vector<PlannedCollective>& out,
    Crossings& crossings,
    const shard::Unit& unit,
    bool crosses_replicas
) const {
  for (const auto& group : unit.groups()) {
    if (!group->trainable()) {
      continue;
    }
    const std::int64_t item = item_bytes(group->dtypes().reduce);
    for (int level = 0; level < parallel().gradient_levels; ++level) {
      const shard::DataAxis& axis = parallel().cuts[static_cast<std::size_t>(level)];
      if (axis.size > 1 && axis.name == parallel().replicate_axis) {
        if (crosses_replicas) {
          add_crossing(out, crossings, unit, *group, level);
        }
      } else if (axis.size > 1) {
        const std::int64_t bytes =
            group->packing().range(parallel().coordinates(level)).numel() * item;
        add(out,
            Phase::kReduce,
            comm::Op::kReduceScatter,
            axis,
            axis.reduce->info().name,
            unit.path(),
            bytes);
      }
    }
    for (const shard::DataAxis& axis : parallel().summed) {
      if (axis.size > 1 && (crosses_replicas || axis.name != "replicate")) {
        const std::int64_t bytes = group->gradient_range().numel() * item;
        add(out,
            Phase::kReduce,
            comm::Op::kAllReduce,
            axis,
            axis.reduce->info().name,
            unit.path(),
            bytes);
      }
    }
    if (crosses_replicas || !has_outer_reduction()) {
      add_plan_reduce(out, *group);
    }
  }
}

// The units of a bucket cross together, in a collective for each kind of group: NOTE [buckets].
void Planner::add_crossing(
    std::vector<PlannedCollective>& out,
    Crossings& crossings,
    const shard::Unit& unit,
    const shard::ParamGroup& group,
    int level
) const {
  const shard::DataAxis& axis = parallel().cuts[static_cast<std::size_t>(level)];
  const shard::GroupDtypes& dtypes = group.dtypes();
  const c10::ScalarType wire = dtypes.wire.value_or(dtypes.reduce);
  const std::int64_t bytes =
      group.packing().range(parallel().coordinates(level)).numel() * item_bytes(wire);
  const std::string& bucket = engine_.buckets().name_of(unit.index());
  const std::string kind = concat_text(
      bucket, '/', dtype_word(wire), '/', dtype_word(dtypes.update), group.reduce_axes().empty()
  );
  const auto [at, is_new] = crossings.try_emplace(kind, out.size());
  const std::string& ranks = axis.reduce->info().name;
  add(out, Phase::kReduce, comm::Op::kReduceScatter, axis, ranks, bucket, bytes);
  if (!is_new) {
    out[at->second].payload_bytes += out.back().payload_bytes;
    out[at->second].sent_bytes += out.back().sent_bytes;
    out.pop_back();
  }
}

// Tells whether gradients are summed over replicas, which micro-batches may put off.
bool Planner::has_outer_reduction() const {
  const auto is_outer = [](const shard::DataAxis& axis) {
    return axis.name == "replicate" && axis.size > 1;
  };
  const auto levels = parallel().cuts.begin() + parallel().gradient_levels;
  return std::any_of(parallel().cuts.begin(), levels, is_outer) ||
         std::any_of(parallel().summed.begin(), parallel().summed.end(), is_outer);
}

// What is Partial on axes of the plan is summed there last, on the slice that is left.
void Planner::add_plan_reduce(std::vector<PlannedCollective>& out, const shard::ParamGroup& group)
    const {
  const std::vector<std::string>& axes = group.params().front().part.reduce_axes;
  if (axes.empty()) {
    return;
  }
  const comm::Communicator& ranks = *parallel().plan_reduce.at(axes);
  const std::int64_t bytes = group.gradient_range().numel() * item_bytes(group.dtypes().reduce);
  out.push_back(
      {.phase = Phase::kReduce,
       .op = comm::Op::kAllReduce,
       .axis = ranks.info().name,
       .tier = mesh_.tier(axes),
       .unit = group.unit(),
       .payload_bytes = bytes,
       .sent_bytes = 2 * (bytes - bytes / ranks.size())}
  );
}

void Planner::add_step(std::vector<PlannedCollective>& out) const {
  for (const auto& unit : engine_.units()) {
    for (const auto& group : unit->groups()) {
      add_gathers(
          out, Phase::kPublish, *group, parallel().update_levels, parallel().runtime_levels
      );
    }
  }
  const std::int64_t num_micro = config_.batch.accumulation;
  const auto& units = engine_.units();
  for (std::int64_t micro = 0; micro < num_micro; ++micro) {
    const bool is_last = micro + 1 == num_micro;
    for (const auto& unit : units) {
      add_unshard(out, Phase::kForward, *unit);
    }
    Crossings crossings;
    for (std::size_t i = units.size(); i-- > 0;) {
      if (units[i]->reshard_after_forward) {
        add_unshard(out, Phase::kBackward, *units[i]);
      }
      if (is_last || config_.batch.sync != Sync::kLast) {
        add_reduce(out, crossings, *units[i], is_last || config_.batch.sync != Sync::kInner);
      }
    }
  }
}

std::int64_t Planner::gradient_buffer_bytes() const {
  // Units of one size take turns in a ring; a size of its own has one buffer.
  std::map<std::int64_t, int> units_of_size;
  for (const auto& unit : engine_.units()) {
    bool needs_buffer = false;
    for (const auto& group : unit->groups()) {
      needs_buffer = needs_buffer || group->gradient_range().numel() != group->packing().numel ||
                     group->dtypes().reduce != group->dtypes().update;
    }
    if (needs_buffer) {
      ++units_of_size[unit->gradient_bytes()];
    }
  }
  std::int64_t sum = 0;
  for (const auto& [bytes, count] : units_of_size) {
    const int held =
        config_.batch.sync == Sync::kLast && config_.batch.accumulation > 1 ? count : 0;
    sum += bytes * std::max(held, std::min(count, engine_.gradient_buffer_depth()));
  }
  return sum + slice_bytes();
}

// Sums inside a supernode on their way to the others.
std::int64_t Planner::slice_bytes() const {
  const bool adds_up = config_.batch.accumulation > 1 && config_.batch.sync == Sync::kEvery;
  const bool in_place = adds_up || config_.optimizer.step_in_backward;
  std::map<std::int64_t, int> units_of_size;
  for (const auto& unit : engine_.units()) {
    ++units_of_size[unit->slice_bytes({.rest_in_buffer = in_place})];
  }
  std::int64_t sum = 0;
  for (const auto& [bytes, count] : units_of_size) {
    sum += bytes * std::min(count, engine_.slice_depth());
  }
  return sum;
}

std::int64_t Planner::unsharded_bytes() const {
  std::int64_t always = 0;
  std::vector<std::int64_t> in_turn;
  for (const auto& unit : engine_.units()) {
    std::int64_t bytes = 0;
    for (const auto& group : unit->groups()) {
      if (group->mode() == shard::RuntimeMode::kGathered) {
        bytes += group->whole_compute_bytes();
        bytes +=
            group->dtypes().storage == group->dtypes().compute ? 0 : group->whole_storage_bytes();
      }
    }
    if (unit->reshard_after_forward) {
      in_turn.push_back(bytes);
    } else {
      always += bytes;
    }
  }
  std::sort(in_turn.rbegin(), in_turn.rend());
  const auto ahead = static_cast<std::size_t>(
      1 + std::max(config_.parallel.forward_prefetch, config_.parallel.backward_prefetch)
  );
  for (std::size_t i = 0; i < std::min(ahead, in_turn.size()); ++i) {
    always += in_turn[i];
  }
  return always;
}

// Then a reduced gradient never leaves the buffer it was reduced in.
bool Planner::uses_up_gradients(const shard::ParamGroup& group) const {
  const bool adds_up = config_.batch.accumulation > 1 && config_.batch.sync != Sync::kLast;
  return config_.optimizer.step_in_backward && !adds_up &&
         group.dtypes().reduce == group.dtypes().update &&
         group.gradient_range().numel() != group.packing().numel;
}

MemoryPlan Planner::plan_memory() const {
  MemoryPlan memory;
  const int states = config_.optimizer.kind == OptimizerKind::kAdamW ? 2
                     : config_.optimizer.momentum > 0                ? 1
                                                                     : 0;
  for (const auto& unit : engine_.units()) {
    for (const auto& group : unit->groups()) {
      const std::int64_t update_item = item_bytes(group->dtypes().update);
      const std::int64_t update_bytes = group->update_range().numel() * update_item;
      if (group->mode() == shard::RuntimeMode::kShared) {
        memory.shared_runtime += group->whole_storage_bytes();
      } else {
        memory.runtime += group->runtime_range().numel() * item_bytes(group->dtypes().storage);
      }
      memory.gradients +=
          uses_up_gradients(*group) ? 0 : group->gradient_range().numel() * update_item;
      memory.update += group->update_is_runtime() ? 0 : update_bytes;
      memory.optimizer += states * update_bytes;
    }
  }
  memory.unsharded = unsharded_bytes();
  memory.gradient_buffers = gradient_buffer_bytes();
  return memory;
}

}  // namespace

std::string to_text(Phase phase) {
  switch (phase) {
    case Phase::kForward:
      return "forward";
    case Phase::kBackward:
      return "backward";
    case Phase::kReduce:
      return "reduce";
    case Phase::kPublish:
      return "publish";
  }
  return "?";
}

layout::Topology planned_topology(const RunConfig& config, int world_size) {
  const int supernodes = config.parallel.supernodes;
  if (supernodes <= 1) {
    return layout::Topology::single_supernode(world_size);
  }
  std::vector<std::string> labels;
  for (int rank = 0; rank < world_size; ++rank) {
    labels.push_back(std::to_string(rank / (world_size / supernodes)));
  }
  return layout::Topology::from_labels(labels);
}

RunPlan plan_run(const RunConfig& config, std::int64_t vocab_size, int world_size, int rank) {
  const model::GptConfig shape = gpt_config(config, vocab_size);
  const layout::Topology topology = planned_topology(config, world_size);
  const bool has_shared_memory = config.parallel.backend != comm::Backend::kC10d;
  const auto world = comm::make_fake_world(rank, topology, {.shared_memory = has_shared_memory});
  const auto mesh = std::make_shared<comm::ProcessMesh>(world, make_mesh(config, topology));
  RunPlan plan(mesh->mesh());
  plan.rank = rank;
  plan.strategy =
      config.parallel.layouts.are_given() ? "stated layouts" : to_text(config.parallel.strategy);
  plan.parameters = model::num_parameters(shape);
  plan.flops_per_token = model::flops_per_token(shape, config.model.sequence);
  plan.tokens_per_step = config.batch.global_batch * config.model.sequence;

  const internal::GhostMemory ghost;
  model::GptImpl model(
      shape, {.device = at::kMeta, .dtype = parameter_dtype(config), .seed = std::nullopt}
  );
  shard::FullyShardOptions options = shard_options(config, mesh->mesh());
  std::optional<plan::AppliedPlan> applied;
  if (config.has_plan()) {
    applied = apply_layout(config, shape, model, mesh);
    options.parameters = plan::parameter_specs(applied->resolved());
    plan.resolved = applied->resolved();
    internal::add_crossings(plan, config);
  }
  options.initial_values = shard::InitialValues::kTrust;  // there is nobody to compare with
  const shard::ShardedModel sharded = shard::fully_shard(model, *mesh, options);
  plan.layouts = sharded.engine().parallel().layouts;
  Planner(config, sharded.engine(), mesh->mesh()).fill(plan);
  return plan;
}

}  // namespace hypershard::train
