// Why: everything a run depends on stands in one file, and a slip in it is found before any rank is
// started. The structs are plain; the schema that fills, checks and documents them is bound here.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hypershard/comm/world.h"
#include "hypershard/core/config.h"
#include "hypershard/layout/strategy.h"
#include "hypershard/optim/schedule.h"
#include "hypershard/plan/plan_config.h"
#include "hypershard/shard/options.h"

namespace hypershard::model {
struct GptConfig;
}

namespace hypershard::train {

/// Where a run lives and what it starts from.
struct RunSection {
  std::string name;  ///< empty: the config file's name
  std::string dir;   ///< empty: runs/<name>
  std::int64_t seed = 1;
  int threads = 0;  ///< 0: the host's cores by its ranks
  bool pin_cores = true;
  std::int64_t validate_every = 0;  ///< 0: never
};

/// The shape of the model.
struct ModelSection {
  std::string kind = "gpt";
  std::int64_t layers = 4;
  std::int64_t dim = 192;
  std::int64_t heads = 6;
  std::int64_t kv_heads = 0;    ///< 0: as many as heads
  std::int64_t hidden_dim = 0;  ///< 0: 8/3 dim, rounded up to a multiple of 64
  std::int64_t sequence = 256;
  double rope_theta = 10'000;
  bool tie_embeddings = true;
  bool recompute = false;
  double norm_eps = 1e-5;
  double init_std = 0.02;
};

/// What it learns from.
struct DataSection {
  std::string path;
  bool shuffle = true;
};

/// The data axes (`replicate`, `shard`) that each plane is split along, instead of a strategy's.
struct StatedLayouts {
  std::vector<std::string> runtime = {"strategy"};
  std::vector<std::string> gradient = {"strategy"};
  std::vector<std::string> update = {"strategy"};

  bool are_given() const;
};

/// How it is spread over ranks.
struct ParallelSection {
  layout::Strategy strategy = layout::Strategy::kZero3;
  StatedLayouts layouts = {};
  int replicate = 1;
  int shard = -1;  ///< -1: what is left
  int tp = 1;      ///< ranks that share one row of data, by a plan
  /// Ready-made plans over `tp`: tensor, sequence, vocabulary. Filled in for tp > 1 if not given.
  std::vector<std::string> plan = {};
  std::vector<std::string> units = {"blocks.*"};
  bool reshard_after_forward = true;
  int forward_prefetch = 1;
  int backward_prefetch = 1;
  int gradient_buffers = 2;
  std::int64_t bucket_bytes = -1;  ///< -1: from the measured link
  shard::Share share = shard::Share::kAuto;
  comm::Backend backend = comm::Backend::kAuto;
  int supernodes = 0;    ///< 0: by host
  double timeout_s = 0;  ///< 0: HS_TIMEOUT_S

  /// Tells whether a ready-made plan is asked for.
  bool has_plan(std::string_view word) const;
};

/// Names of dtypes; `auto` leaves the choice to shard::MixedPrecision.
struct PrecisionSection {
  std::string compute = "auto";
  std::string storage = "auto";
  std::string reduce = "auto";
  std::string wire = "auto";
  std::string update = "auto";
  std::string output = "auto";
};

/// The optimizers there are.
enum class OptimizerKind : std::uint8_t { kAdamW, kSgd };

/// How update parameters move.
struct OptimizerSection {
  OptimizerKind kind = OptimizerKind::kAdamW;
  double lr = 1e-3;
  std::vector<double> betas = {0.9, 0.95};
  double eps = 1e-8;
  double weight_decay = 0.1;
  double momentum = 0.9;
  bool nesterov = false;
  double clip_norm = 1.0;  ///< 0: no clipping
  double clip_p = 2.0;     ///< 0: the largest absolute value
  bool step_in_backward = false;
};

/// How the learning rate runs.
struct ScheduleSection {
  std::int64_t steps = 1000;
  std::int64_t warmup_steps = 50;
  optim::Decay decay = optim::Decay::kCosine;
  double min_lr_ratio = 0.1;
};

/// What is communicated between the micro-batches of a step.
enum class Sync : std::uint8_t {
  kAuto,   ///< kInner if there is a `replicate` axis, else kEvery
  kEvery,  ///< each micro-batch is reduced: least memory
  kLast,   ///< gradients stay local until the last: least communication, a whole gradient a rank
  kInner,  ///< reduce inside `shard` each time, across `replicate` on the last
};

/// How much a step sees.
struct BatchSection {
  std::int64_t global_batch = 16;
  std::int64_t accumulation = 1;
  Sync sync = Sync::kAuto;
};

/// When held-out loss is measured.
struct EvalSection {
  std::int64_t every = 200;       ///< 0: never during the run
  std::int64_t tokens = 65'536;   ///< 0: all
  std::int64_t final_tokens = 0;  ///< at the end; 0: all
  bool at_start = true;
  bool at_end = true;
};

/// When state is saved.
struct CheckpointSection {
  std::int64_t every = 0;  ///< 0: never during the run
  int keep = 2;            ///< 0: all
  bool at_end = true;
};

/// What a run writes.
struct LogSection {
  std::string metrics;  ///< empty: <run.dir>/metrics.jsonl
  std::int64_t every = 10;
  std::string trace;  ///< empty: none
  std::int64_t trace_first_step = 3;
  std::int64_t trace_steps = 3;  ///< 10 with `profile`, if the key is not given
  bool profile = false;
};

/// Everything a training run is told.
struct RunConfig {
  RunSection run;
  ModelSection model;
  DataSection data;
  ParallelSection parallel;
  plan::PlanConfig plan;
  PrecisionSection precision;
  OptimizerSection optimizer;
  ScheduleSection schedule;
  BatchSection batch;
  EvalSection eval;
  CheckpointSection checkpoint;
  LogSection log;

  /// Returns the file that metrics go to.
  std::string metrics_path() const;
  /// Returns the file that a trace goes to, empty for none.
  std::string trace_path() const;
  /// Returns the sizes of the mesh axes {replicate, shard, tp} for so many ranks.
  /// Errors: InvalidArgument if they do not fit.
  std::vector<int> mesh_sizes(int world_size) const;
  /// Returns how many ranks see different rows: those of one `tp` group read the same ones.
  int num_data_ranks(int world_size) const { return world_size / parallel.tp; }
  /// Tells whether something is said about axes that are no data axes.
  bool has_plan() const;
};

/// Returns the shape of the model. Errors: InvalidArgument naming the field.
model::GptConfig gpt_config(const RunConfig& config, std::int64_t vocab_size);

/// A configuration with the schema that is bound to it.
///
/// load() fills, checks across keys (with the number of ranks, if it is known) and then writes what
/// was left open (`run.name`, `model.kv_heads`, ...) into the fields, so that to_toml() is
/// complete.
class RunConfigFile {
 public:
  RunConfigFile();
  RunConfigFile(const RunConfigFile&) = delete;
  RunConfigFile& operator=(const RunConfigFile&) = delete;

  /// Reads a file and `key=value` overrides. HS_SEED, HS_THREADS, HS_SHARE and HS_TRACE fill what
  /// these leave open.
  /// Errors: IoError, InvalidArgument listing every problem with file and line.
  void load(const std::string& path, std::span<const std::string> overrides, int world_size);
  /// The same from text, for tests; `name` stands for the file.
  void load_text(
      std::string_view text,
      const std::string& name,
      std::span<const std::string> overrides,
      int world_size
  );

  RunConfig& config() { return config_; }
  const RunConfig& config() const { return config_; }
  const Schema& schema() const { return schema_; }
  std::string to_toml() const { return schema_.to_toml(); }

 private:
  void add_checks();
  void finish(const std::string& name);
  void fill_from_environment();

  RunConfig config_;
  Schema schema_;
  int world_size_ = 0;
};

}  // namespace hypershard::train
