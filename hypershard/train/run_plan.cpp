// Why: see run_plan.h. The engine is built over a fake world; what it would do in a step follows
// from the groups that it made. A test compares with the log of a real step.
#include "hypershard/train/run_plan.h"

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <utility>

#include "hypershard/comm/fake/fake_world.h"
#include "hypershard/comm/traffic.h"
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

// A gather or a scatter of so many elements by rank, as its communicator will count it.
PlannedCollective planned_exchange(
    Phase phase,
    comm::Op op,
    const comm::Communicator& ranks,
    const std::string& unit,
    const std::vector<std::int64_t>& counts,
    c10::ScalarType dtype
) {
  const comm::Traffic traffic = op == comm::Op::kAllGather
                                    ? comm::gather_traffic(counts, ranks.rank())
                                    : comm::scatter_traffic(counts, ranks.rank());
  const std::int64_t numel = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  return {
      .phase = phase,
      .op = op,
      .axis = ranks.info().name,
      .tier = ranks.info().tier,
      .unit = unit,
      .payload_bytes = numel * item_bytes(dtype),
      .sent_bytes = traffic.sent * item_bytes(dtype)
  };
}

PlannedCollective planned_sum(
    const comm::Communicator& ranks,
    const std::string& unit,
    std::int64_t numel,
    c10::ScalarType dtype
) {
  const std::int64_t item = item_bytes(dtype);
  return {
      .phase = Phase::kReduce,
      .op = comm::Op::kAllReduce,
      .axis = ranks.info().name,
      .tier = ranks.info().tier,
      .unit = unit,
      .payload_bytes = numel * item,
      .sent_bytes = comm::all_reduce_traffic(numel, item, ranks.rank(), ranks.size()).sent
  };
}

// Adds up what the engine's structure implies.
class Planner {
 public:
  Planner(const RunConfig& config, int world_size, const shard::Engine& engine)
      : config_(config), sync_(gradient_sync(config, world_size)), engine_(engine) {}

  void fill(RunPlan& plan);

 private:
  const shard::DataParallel& parallel() const { return engine_.parallel(); }
  UnitPlan plan_unit(const shard::Unit& unit) const;
  void add_step(std::vector<PlannedCollective>& out) const;
  void add_publish(std::vector<PlannedCollective>& out) const;
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
  void add_whole_sums(
      std::vector<PlannedCollective>& out,
      const std::string& unit,
      const shard::ParamGroup& group,
      bool crosses_replicas
  ) const;
  bool has_outer_reduction() const;
  bool measures_buckets() const;
  void add_plan_reduce(std::vector<PlannedCollective>& out, const shard::ParamGroup& group) const;
  GroupMemory group_memory(const shard::ParamGroup& group) const;
  MemoryPlan plan_memory() const;
  std::int64_t gradient_buffer_bytes() const;
  std::int64_t slice_bytes() const;
  bool uses_up_gradients(const shard::ParamGroup& group) const;
  std::int64_t unsharded_bytes(shard::RuntimeMode mode) const;

  const RunConfig& config_;
  const Sync sync_;
  const shard::Engine& engine_;
};

void Planner::fill(RunPlan& plan) {
  for (const auto& unit : engine_.units()) {
    plan.units.push_back(plan_unit(*unit));
  }
  plan.why_not_shared = engine_.why_not_shared();
  plan.measures_buckets = measures_buckets();
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
         .runtime = to_text(group->mode()),
         .memory = group_memory(*group)}
    );
  }
  return plan;
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
      out.push_back(planned_exchange(
          phase,
          comm::Op::kAllGather,
          *axis.gather,
          group.unit(),
          group.packing().counts(parallel().coordinates(level)),
          group.dtypes().storage
      ));
    }
  }
}

void Planner::add_unshard(std::vector<PlannedCollective>& out, Phase phase, const shard::Unit& unit)
    const {
  for (const auto& group : unit.groups()) {
    if (group->gathers()) {
      const bool is_shared = group->mode() == shard::RuntimeMode::kPooled;
      add_gathers(out, phase, *group, parallel().runtime_levels, is_shared ? 1 : 0);
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
    for (int level = 0; level < parallel().gradient_levels; ++level) {
      const shard::DataAxis& axis = parallel().cuts[static_cast<std::size_t>(level)];
      if (axis.size > 1 && axis.name == parallel().replicate_axis) {
        if (crosses_replicas) {
          add_crossing(out, crossings, unit, *group, level);
        }
      } else if (axis.size > 1) {
        out.push_back(planned_exchange(
            Phase::kReduce,
            comm::Op::kReduceScatter,
            *axis.reduce,
            unit.path(),
            group->packing().counts(parallel().coordinates(level)),
            group->dtypes().reduce
        ));
      }
    }
    add_whole_sums(out, unit.path(), *group, crosses_replicas);
    if (crosses_replicas || !has_outer_reduction()) {
      add_plan_reduce(out, *group);
    }
  }
}

// Sums that every rank gets whole. Over two tiers each rank of a supernode takes a share of them
// across: NOTE [steps of a reduction].
void Planner::add_whole_sums(
    std::vector<PlannedCollective>& out,
    const std::string& unit,
    const shard::ParamGroup& group,
    bool crosses_replicas
) const {
  const shard::GroupDtypes& dtypes = group.dtypes();
  const bool joins = group.joins_inside();
  const auto exchange_shares = [&](comm::Op op, const comm::Communicator& ranks) {
    out.push_back(
        planned_exchange(Phase::kReduce, op, ranks, unit, group.crossing_shares(), dtypes.reduce)
    );
  };
  const std::int64_t whole = group.gradient_range().numel();
  for (const shard::DataAxis& axis : parallel().summed) {
    if (axis.size == 1) {
      continue;
    }
    if (axis.name == parallel().replicate_axis) {
      if (crosses_replicas) {
        const std::int64_t share = joins ? group.crossing_range().numel() : whole;
        const c10::ScalarType wire = dtypes.wire.value_or(dtypes.reduce);
        out.push_back(planned_sum(*axis.reduce, unit, share, wire));
      }
    } else if (joins) {
      exchange_shares(comm::Op::kReduceScatter, *axis.reduce);
    } else {
      out.push_back(planned_sum(*axis.reduce, unit, whole, dtypes.reduce));
    }
  }
  if (joins && crosses_replicas) {
    exchange_shares(comm::Op::kAllGather, *parallel().summed.front().gather);
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
  const std::string& bucket = engine_.buckets().name_of(unit.index());
  const std::string kind = concat_text(
      bucket, '/', dtype_word(wire), '/', dtype_word(dtypes.update), group.reduce_axes().empty()
  );
  const PlannedCollective crossing = planned_exchange(
      Phase::kReduce,
      comm::Op::kReduceScatter,
      *axis.reduce,
      bucket,
      group.packing().counts(parallel().coordinates(level)),
      wire
  );
  const auto [at, is_new] = crossings.try_emplace(kind, out.size());
  if (is_new) {
    out.push_back(crossing);
  } else {
    out[at->second].payload_bytes += crossing.payload_bytes;
    out[at->second].sent_bytes += crossing.sent_bytes;
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
  out.push_back(planned_sum(
      *parallel().plan_reduce.at(axes),
      group.unit(),
      group.gradient_range().numel(),
      group.dtypes().reduce
  ));
}

// Tells whether a run measures its link to choose buckets, of which a plan knows nothing.
bool Planner::measures_buckets() const {
  if (config_.parallel.bucket_bytes >= 0) {
    return false;
  }
  const auto& cuts = parallel().cuts;
  return std::any_of(
      cuts.begin(),
      cuts.begin() + parallel().gradient_levels,
      [&](const auto& axis) {
        const bool is_link = axis.reduce->info().tier == layout::Tier::kInter ||
                             config_.parallel.backend == comm::Backend::kC10d;
        return axis.name == parallel().replicate_axis && axis.size > 1 && is_link;
      }
  );
}

void Planner::add_publish(std::vector<PlannedCollective>& out) const {
  for (const auto& unit : engine_.units()) {
    for (const auto& group : unit->groups()) {
      if (group->trainable()) {  // the others were published in the first step
        add_gathers(
            out, Phase::kPublish, *group, parallel().update_levels, parallel().runtime_levels
        );
      }
    }
  }
}

void Planner::add_step(std::vector<PlannedCollective>& out) const {
  const std::int64_t num_micro = config_.batch.accumulation;
  const auto& units = engine_.units();
  for (std::int64_t micro = 0; micro < num_micro; ++micro) {
    const bool is_last = micro + 1 == num_micro;
    if (micro == 0 || sync_ == Sync::kEvery) {
      add_publish(out);  // the backward before reduced over all axes: NOTE [write window]
    }
    for (const auto& unit : units) {
      add_unshard(out, Phase::kForward, *unit);
    }
    Crossings crossings;
    for (std::size_t i = units.size(); i-- > 0;) {
      if (units[i]->reshard_after_forward) {
        add_unshard(out, Phase::kBackward, *units[i]);
      }
      if (is_last || sync_ != Sync::kLast) {
        add_reduce(out, crossings, *units[i], is_last || sync_ != Sync::kInner);
      }
    }
  }
}

std::int64_t Planner::gradient_buffer_bytes() const {
  const bool accumulates = config_.batch.accumulation > 1;
  const bool adds_up = accumulates && sync_ == Sync::kEvery;
  const bool holds = accumulates && sync_ == Sync::kLast;
  // Units of one size take turns in a ring; a size of its own has one buffer.
  std::map<std::int64_t, int> units_of_size;
  std::set<std::int64_t> sizes_of_whole;  // gradients that are written where they come to rest
  for (const auto& unit : engine_.units()) {
    bool needs_buffer = false;
    for (const auto& group : unit->groups()) {
      needs_buffer = needs_buffer || group->gradient_range().numel() != group->packing().numel ||
                     group->dtypes().reduce != group->dtypes().update;
    }
    if (needs_buffer) {
      ++units_of_size[unit->gradient_bytes()];
    } else if (adds_up) {
      sizes_of_whole.insert(unit->gradient_bytes());  // which hold a sum already
    }
  }
  // Buffers that are held until the last micro-batch stand in for the ring; where peers read it, it
  // is there all the same.
  const bool is_shared =
      parallel().gradient_levels > 0 && parallel().cuts.front().reduce->has_shared_memory();
  std::int64_t sum = std::accumulate(sizes_of_whole.begin(), sizes_of_whole.end(), slice_bytes());
  for (const auto& [bytes, count] : units_of_size) {
    const int ring = std::min(count, engine_.gradient_buffer_depth());
    sum += bytes * (holds ? count + (is_shared ? ring : 0) : ring);
  }
  return sum;
}

// Sums inside a supernode on their way to the others.
std::int64_t Planner::slice_bytes() const {
  const bool adds_up = config_.batch.accumulation > 1 && sync_ == Sync::kEvery;
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

std::int64_t Planner::unsharded_bytes(shard::RuntimeMode mode) const {
  std::int64_t always = 0;
  std::vector<std::int64_t> in_turn;
  for (const auto& unit : engine_.units()) {
    std::int64_t bytes = 0;
    for (const auto& group : unit->groups()) {
      if (group->mode() == mode) {
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
  const bool adds_up = config_.batch.accumulation > 1 && sync_ != Sync::kLast;
  return config_.optimizer.step_in_backward && !adds_up &&
         group.dtypes().reduce == group.dtypes().update &&
         group.gradient_range().numel() != group.packing().numel;
}

GroupMemory Planner::group_memory(const shard::ParamGroup& group) const {
  const int states = config_.optimizer.kind == OptimizerKind::kAdamW ? 2
                     : config_.optimizer.momentum > 0                ? 1
                                                                     : 0;
  const bool keeps_partial =
      config_.batch.accumulation > 1 && sync_ == Sync::kInner && has_outer_reduction();
  const std::int64_t update_item = item_bytes(group.dtypes().update);
  const std::int64_t update_bytes = group.update_range().numel() * update_item;
  GroupMemory memory;
  if (group.mode() == shard::RuntimeMode::kShared) {
    memory.shared_runtime = group.whole_storage_bytes();
  } else {
    memory.runtime = group.runtime_range().numel() * item_bytes(group.dtypes().storage);
  }
  memory.gradients = uses_up_gradients(group) ? 0 : group.gradient_range().numel() * update_item;
  memory.gradients += keeps_partial ? group.crossing_range().numel() * update_item : 0;
  memory.update = group.update_is_runtime() ? 0 : update_bytes;
  memory.optimizer = states * update_bytes;
  return memory;
}

MemoryPlan Planner::plan_memory() const {
  MemoryPlan memory;
  for (const auto& unit : engine_.units()) {
    for (const auto& group : unit->groups()) {
      const GroupMemory own = group_memory(*group);
      memory.runtime += own.runtime;
      memory.shared_runtime += own.shared_runtime;
      memory.gradients += own.gradients;
      memory.update += own.update;
      memory.optimizer += own.optimizer;
    }
  }
  memory.unsharded = unsharded_bytes(shard::RuntimeMode::kGathered);
  memory.shared_unsharded = unsharded_bytes(shard::RuntimeMode::kPooled);
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
  Planner(config, world_size, sharded.engine()).fill(plan);
  return plan;
}

}  // namespace hypershard::train
