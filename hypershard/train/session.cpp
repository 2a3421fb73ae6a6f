// Why: see session.h. One function a part, in the order in which they are built.
#include "hypershard/train/session.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include "hypershard/comm/c10d/launch_env.h"
#include "hypershard/core/env.h"
#include "hypershard/core/error.h"
#include "hypershard/core/log.h"
#include "hypershard/core/process.h"
#include "hypershard/core/random.h"
#include "hypershard/model/gpt.h"
#include "hypershard/optim/adamw.h"
#include "hypershard/optim/schedule.h"
#include "hypershard/optim/sgd.h"
#include "hypershard/plan/parameter_specs.h"
#include "hypershard/plan/tracker.h"
#include "hypershard/train/process_memory.h"
#include "hypershard/train/run_layout.h"

namespace hypershard::train {
namespace {

constexpr std::pair<const char*, at::ScalarType> kDtypes[] = {
    {"fp64", at::kDouble}, {"fp32", at::kFloat}, {"bf16", at::kBFloat16}, {"fp16", at::kHalf}
};

std::optional<at::ScalarType> dtype_of(const std::string& word) {
  for (const auto& [name, dtype] : kDtypes) {
    if (word == name) {
      return dtype;
    }
  }
  return std::nullopt;  // auto
}

bool needs_both_axes(const ParallelSection& parallel) {
  return parallel.strategy == layout::Strategy::kHsdp ||
         parallel.strategy == layout::Strategy::kHierarchical || parallel.layouts.are_given();
}

layout::Layout split_along(const std::vector<std::string>& axes, const layout::DeviceMesh& mesh) {
  layout::Layout layout = layout::replicated_layout(mesh);
  for (std::size_t i = 0; i < mesh.axes().size(); ++i) {
    if (std::find(axes.begin(), axes.end(), mesh.axes()[i].name) != axes.end()) {
      layout.placements[i] = layout::Placement::flat();
    }
  }
  return layout;
}

std::shared_ptr<model::GptImpl> build_model(
    const RunConfig& config, const model::GptConfig& shape
) {
  return std::make_shared<model::GptImpl>(
      shape,
      model::GptOptions{.device = at::kMeta, .dtype = parameter_dtype(config), .seed = std::nullopt}
  );
}

std::unique_ptr<optim::ShardedOptimizer> build_optimizer(
    const OptimizerSection& config, const shard::ShardedModel& sharded
) {
  if (config.kind == OptimizerKind::kSgd) {
    return std::make_unique<optim::Sgd>(
        sharded,
        optim::SgdOptions{
            .lr = config.lr,
            .momentum = config.momentum,
            .nesterov = config.nesterov,
            .weight_decay = config.weight_decay
        }
    );
  }
  return std::make_unique<optim::AdamW>(
      sharded,
      optim::AdamWOptions{
          .lr = config.lr,
          .beta1 = config.betas.at(0),
          .beta2 = config.betas.at(1),
          .eps = config.eps,
          .weight_decay = config.weight_decay
      }
  );
}

// Evaluations use rows of the size of a micro-batch, so that they need no memory of their own.
data::EvaluationOptions evaluation_options(
    const RunConfig& config, int num_data_ranks, std::int64_t max_tokens
) {
  return {
      .sequence_length = config.model.sequence,
      .rows_per_rank = config.batch.global_batch / (config.batch.accumulation * num_data_ranks),
      .max_tokens = max_tokens
  };
}

}  // namespace

at::ScalarType parameter_dtype(const RunConfig& config) {
  // Half types are what parameters are gathered and used in, never what they are made in.
  const bool is_double = config.precision.compute == "fp64" || config.precision.update == "fp64";
  return is_double ? at::kDouble : at::kFloat;
}

at::ScalarType compute_dtype(const RunConfig& config) {
  return dtype_of(config.precision.compute).value_or(parameter_dtype(config));
}

at::ScalarType storage_dtype(const RunConfig& config) {
  return dtype_of(config.precision.storage).value_or(compute_dtype(config));
}

Sync gradient_sync(const RunConfig& config, int world_size) {
  if (config.batch.sync != Sync::kAuto) {
    return config.batch.sync;
  }
  const int num_replicas = config.mesh_sizes(world_size).front();
  return num_replicas > 1 ? Sync::kInner : Sync::kEvery;
}

std::string dtype_word(at::ScalarType dtype) {
  for (const auto& [name, known] : kDtypes) {
    if (dtype == known) {
      return name;
    }
  }
  return c10::toString(dtype);
}

shard::FullyShardOptions shard_options(const RunConfig& config, const layout::DeviceMesh& mesh) {
  const ParallelSection& parallel = config.parallel;
  shard::FullyShardOptions options;
  options.strategy = parallel.strategy;
  if (parallel.layouts.are_given()) {
    options.layouts = {
        .runtime = split_along(parallel.layouts.runtime, mesh),
        .gradient = split_along(parallel.layouts.gradient, mesh),
        .update = split_along(parallel.layouts.update, mesh)
    };
  }
  options.units = parallel.units;
  options.precision = {
      .storage = dtype_of(config.precision.storage),
      .compute = dtype_of(config.precision.compute),
      .reduce = dtype_of(config.precision.reduce),
      .wire = dtype_of(config.precision.wire),
      .update = dtype_of(config.precision.update),
      .output = dtype_of(config.precision.output)
  };
  options.reshard_after_forward = parallel.reshard_after_forward;
  options.forward_prefetch = parallel.forward_prefetch;
  options.backward_prefetch = parallel.backward_prefetch;
  options.gradient_buffers = parallel.gradient_buffers;
  if (parallel.bucket_bytes >= 0) {
    options.bucket_bytes = parallel.bucket_bytes;
  }
  options.share = parallel.share;
  return options;
}

layout::DeviceMesh make_mesh(const RunConfig& config, const layout::Topology& topology) {
  const std::vector<int> sizes = config.mesh_sizes(topology.world_size());
  std::vector<layout::MeshAxis> axes;
  if (sizes[0] > 1 || needs_both_axes(config.parallel)) {
    axes.push_back({"replicate", sizes[0]});
  }
  axes.push_back({"shard", sizes[1]});
  if (config.has_plan()) {
    axes.push_back({"tp", sizes[2]});  // innermost: its ranks exchange activations
  }
  return layout::DeviceMesh(std::move(axes), topology);
}

std::shared_ptr<comm::World> join_world(const RunConfig& config) {
  const ParallelSection& parallel = config.parallel;
  if (parallel.supernodes > 0) {
    const comm::LaunchInfo info = comm::parse_launch_env(comm::process_environment());
    const int supernode = info.rank / (info.world_size / parallel.supernodes);
    ::setenv("HS_SUPERNODE", std::to_string(supernode).c_str(), 1);
  }
  return comm::World::join({.backend = parallel.backend, .timeout_s = parallel.timeout_s});
}

void set_up_process(const RunConfig& config, int local_ranks) {
  keep_freed_memory();
  int threads = config.run.threads;
  if (threads == 0) {
    threads = static_cast<int>(env::get_int("HS_THREADS"));
  }
  if (threads == 0) {
    threads = std::max(1, available_cores() / std::max(1, local_ranks));
  }
  at::set_num_threads(threads);
}

TrainingData open_data(const RunConfig& config, int world_size) {
  const ErrorContext context("open data");
  const int num_data_ranks = config.num_data_ranks(world_size);
  TrainingData data;
  data.prepared = data::open_prepared(config.data.path);
  data.train.emplace(
      data.prepared.train.path,
      data::DatasetOptions{
          .sequence_length = config.model.sequence,
          .global_batch = config.batch.global_batch,
          .accumulation = config.batch.accumulation,
          .seed = static_cast<std::uint64_t>(config.run.seed),
          .shuffle = config.data.shuffle
      }
  );
  if (data.prepared.val.path.empty()) {
    return data;
  }
  if (config.eval.every > 0 || config.eval.at_start) {
    data.evaluation.emplace(
        data.prepared.val.path, evaluation_options(config, num_data_ranks, config.eval.tokens)
    );
  }
  if (config.eval.at_end) {
    data.final_evaluation.emplace(
        data.prepared.val.path, evaluation_options(config, num_data_ranks, config.eval.final_tokens)
    );
  }
  return data;
}

TrainingData random_data(std::int64_t vocab_size) {
  TrainingData data;
  data.prepared.vocab_size = vocab_size;
  return data;
}

data::Batch TrainingData::batch(
    const RunConfig& config, std::int64_t step, std::int64_t micro, int data_rank, int size
) const {
  if (train.has_value()) {
    return train->batch(step, micro, data_rank, size);
  }
  const std::int64_t rows = config.batch.global_batch / (config.batch.accumulation * size);
  const std::int64_t first = step * config.batch.global_batch + (micro * size + data_rank) * rows;
  const at::Tensor tokens = at::empty({rows, config.model.sequence + 1}, at::kLong);
  auto* values = tokens.mutable_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < tokens.numel(); ++i) {
    values[i] = static_cast<std::int64_t>(index_below(
        static_cast<std::uint64_t>(prepared.vocab_size),
        static_cast<std::uint64_t>(config.run.seed),
        stream_of("data/random"),
        static_cast<std::uint64_t>(first * tokens.size(1) + i)
    ));
  }
  return {
      .input = tokens.narrow(1, 0, config.model.sequence).contiguous(),
      .target = tokens.narrow(1, 1, config.model.sequence).contiguous()
  };
}

Session::Session(
    const RunConfig& config,
    std::shared_ptr<comm::World> world,
    TrainingData data,
    const SessionOptions& options
)
    : config_(config),
      world_(std::move(world)),
      everyone_(world_->world_communicator()),
      mesh_(std::make_shared<comm::ProcessMesh>(world_, make_mesh(config_, world_->topology()))),
      data_(std::move(data)),
      shape_(gpt_config(config_, data_.prepared.vocab_size)),
      model_(build_model(config_, shape_)) {
  shard::FullyShardOptions sharding = shard_options(config_, mesh_->mesh());
  if (options.validates || config_.has_plan()) {
    applied_ = apply_layout(config_, shape_, *model_, mesh_);
    sharding.parameters = plan::parameter_specs(applied_->resolved());
  }
  sharded_ = shard::fully_shard(*model_, *mesh_, sharding);
  // Micro-batches have equally many tokens, so the mean over a step is a mean of means.
  sharded_->set_gradient_divide_factor(
      static_cast<double>(config_.batch.accumulation) * num_data_ranks()
  );
  optimizer_ = build_optimizer(config_.optimizer, *sharded_);
}

Session::~Session() = default;

void Session::initialize() const {
  sharded_->initialize(model::gpt_init(shape_), static_cast<std::uint64_t>(config_.run.seed));
}

double Session::learning_rate(std::int64_t step) const {
  const ScheduleSection& schedule = config_.schedule;
  return optim::LearningRate{
      .peak = config_.optimizer.lr,
      .warmup_steps = schedule.warmup_steps,
      .total_steps = schedule.steps,
      .decay = schedule.decay,
      .min_ratio = schedule.min_lr_ratio
  }
      .at(step);
}

data::Batch Session::batch(std::int64_t step, std::int64_t micro) const {
  const plan::TrackingPause pause;  // how rows are read is not the model's
  return data_.batch(config_, step, micro, data_rank(), num_data_ranks());
}

std::int64_t Session::tokens_per_step() const {
  return config_.batch.global_batch * config_.model.sequence;
}

}  // namespace hypershard::train
