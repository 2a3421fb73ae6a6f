// Why: the schema: one line a key, with its limits and a sentence for docs/config.md.
#include "hypershard/train/run_config.h"

#include <filesystem>

#include "hypershard/core/env.h"
#include "hypershard/core/error.h"
#include "hypershard/model/gpt_config.h"
#include "hypershard/train/internal/config_checks.h"
#include "hypershard/train/internal/config_keys.h"

namespace hypershard::train {
namespace {

constexpr std::int64_t kProfiledSteps = 10;  // fewer say little about where the time went

void bind_run(Schema& schema, RunSection& run) {
  schema.section("run", "The run as a whole.")
      .bind("name", &run.name, {.doc = "Name of the run; empty takes the config file's name."})
      .bind(
          "dir",
          &run.dir,
          {.doc =
               "Folder of the run: config.toml, run.json, metrics.jsonl, checkpoints/. Empty takes "
               "runs/<name>."}
      )
      .bind(
          "seed",
          &run.seed,
          {.min = 0, .doc = "Seed of weights and data order; the same on every number of ranks."}
      )
      .bind(
          "threads",
          &run.threads,
          {.min = 0,
           .max = 4096,
           .doc = "Threads inside an operator, for each rank; 0 divides the host's cores by its "
                  "ranks."}
      )
      .bind(
          "validate_every",
          &run.validate_every,
          {.min = 0,
           .doc = "Steps between steps that are validated: each operator's layouts, what ranks "
                  "must have alike, and every gradient against an unsharded step; 0: none."}
      )
      .bind(
          "pin_cores",
          &run.pin_cores,
          {.doc = "With --ranks: give each rank cores of its own where there are enough."}
      );
}

void bind_model(Schema& schema, ModelSection& model) {
  schema.section("model", "The model. The vocabulary comes with the data.")
      .bind_choice(
          "kind",
          &model.kind,
          {"gpt"},
          {.doc = "gpt: decoder with RMSNorm, rotary positions, SwiGLU and grouped-query attention."
          }
      )
      .bind("layers", &model.layers, {.min = 1, .max = 1 << 16, .doc = "Transformer blocks."})
      .bind("dim", &model.dim, {.min = 1, .max = 1 << 24, .doc = "Width of the residual stream."})
      .bind("heads", &model.heads, {.min = 1, .max = 1 << 16, .doc = "Attention heads."})
      .bind(
          "kv_heads",
          &model.kv_heads,
          {.min = 0, .max = 1 << 16, .doc = "Heads of keys and values; 0 takes as many as heads."}
      )
      .bind(
          "hidden_dim",
          &model.hidden_dim,
          {.min = 0,
           .max = 1 << 26,
           .doc =
               "Width of the feed-forward layer; 0 takes 8/3 dim, rounded up to a multiple of 64."}
      )
      .bind(
          "sequence",
          &model.sequence,
          {.min = 1, .max = 1 << 24, .doc = "Tokens in a row of a batch."}
      )
      .bind("rope_theta", &model.rope_theta, {.above = 0, .doc = "Base of the rotary frequencies."})
      .bind(
          "tie_embeddings",
          &model.tie_embeddings,
          {.doc = "Use one matrix for the embedding and the output head."}
      )
      .bind(
          "recompute",
          &model.recompute,
          {.doc = "Keep only the inputs of blocks and compute the rest again in backward."}
      )
      .bind("norm_eps", &model.norm_eps, {.above = 0, .doc = "Added to the mean square in norms."})
      .bind(
          "init_std",
          &model.init_std,
          {.above = 0, .doc = "Standard deviation of the first weights; less for branch outputs."}
      );
}

void bind_data(Schema& schema, DataSection& data) {
  schema.section("data", "The data, as `hypershard data text` prepares it.")
      .bind(
          "path",
          &data.path,
          {.doc = "Folder with manifest.json, train.tokens and val.tokens.", .required = true}
      )
      .bind(
          "shuffle",
          &data.shuffle,
          {.doc = "Visit the text in a new random order each epoch; off reads it from the start."}
      );
}

void bind_optimizer(Schema& schema, OptimizerSection& optimizer) {
  schema.section("optimizer", "How weights are updated.")
      .bind_choice(
          "kind",
          &optimizer.kind,
          {{"adamw", OptimizerKind::kAdamW}, {"sgd", OptimizerKind::kSgd}},
          {.doc = "The optimizer."}
      )
      .bind("lr", &optimizer.lr, {.above = 0, .doc = "Learning rate at its highest."})
      .bind(
          "betas",
          &optimizer.betas,
          {.min = 0,
           .max = 1,
           .min_items = 2,
           .max_items = 2,
           .doc = "adamw: decay of the averages of gradients and of their squares."}
      )
      .bind("eps", &optimizer.eps, {.above = 0, .doc = "adamw: added to the root of the average."})
      .bind(
          "weight_decay",
          &optimizer.weight_decay,
          {.min = 0, .doc = "For parameters of two dimensions and more; not for norms and biases."}
      )
      .bind("momentum", &optimizer.momentum, {.min = 0, .below = 1, .doc = "sgd: momentum."})
      .bind("nesterov", &optimizer.nesterov, {.doc = "sgd: look ahead along the momentum."})
      .bind(
          "clip_norm",
          &optimizer.clip_norm,
          {.min = 0, .doc = "Scale gradients down to this joint norm; 0 does not clip."}
      )
      .bind(
          "clip_p",
          &optimizer.clip_p,
          {.min = 0, .doc = "Which norm: 2 is the usual one, 0 the largest absolute value."}
      )
      .bind(
          "step_in_backward",
          &optimizer.step_in_backward,
          {.doc = "Update each unit as soon as its gradient is reduced: no memory for reduced "
                  "gradients, but no clipping (clip_norm = 0) and no grad_norm."}
      );
}

void bind_schedule(Schema& schema, ScheduleSection& schedule) {
  schema.section("schedule", "How long, and the learning rate on the way.")
      .bind("steps", &schedule.steps, {.min = 1, .doc = "Optimizer steps of the whole run."})
      .bind(
          "warmup_steps",
          &schedule.warmup_steps,
          {.min = 0, .doc = "Steps in which the learning rate rises from 0, in a straight line."}
      )
      .bind_choice(
          "decay",
          &schedule.decay,
          {{"cosine", optim::Decay::kCosine},
           {"linear", optim::Decay::kLinear},
           {"constant", optim::Decay::kNone}},
          {.doc = "How the learning rate falls after that, until the last step."}
      )
      .bind(
          "min_lr_ratio",
          &schedule.min_lr_ratio,
          {.min = 0, .max = 1, .doc = "Learning rate at the end, as a share of optimizer.lr."}
      );
}

void bind_batch(Schema& schema, BatchSection& batch) {
  schema.section("batch", "What a step is made of.")
      .bind(
          "global_batch",
          &batch.global_batch,
          // With the largest sequence, 2^56 tokens: no product of sizes overflows.
          {.min = 1,
           .max = std::int64_t{1} << 32,
           .doc = "Rows of a step, over all ranks and micro-batches."}
      )
      .bind(
          "accumulation",
          &batch.accumulation,
          {.min = 1, .max = std::int64_t{1} << 32, .doc = "Micro-batches of a step."}
      )
      .bind_choice(
          "sync",
          &batch.sync,
          {{"auto", Sync::kAuto},
           {"every", Sync::kEvery},
           {"last", Sync::kLast},
           {"inner", Sync::kInner}},
          {.doc =
               "When gradients are reduced: in every micro-batch (least memory), in the last one "
               "only (least communication), or inside `shard` in every one and over `replicate` "
               "in the last; auto: inner where replicate is larger than 1, else every."}
      );
}

void bind_rest(Schema& schema, RunConfig& config) {
  schema.section("eval", "The loss on held-out text.")
      .bind("every", &config.eval.every, {.min = 0, .doc = "Steps between evaluations; 0: none."})
      .bind(
          "tokens",
          &config.eval.tokens,
          {.min = 0, .doc = "Tokens of an evaluation during the run; 0: the whole held-out text."}
      )
      .bind("at_start", &config.eval.at_start, {.doc = "Evaluate before the first step."})
      .bind("at_end", &config.eval.at_end, {.doc = "Evaluate after the last step."})
      .bind(
          "final_tokens",
          &config.eval.final_tokens,
          {.min = 0, .doc = "Tokens of the evaluation after the last step; 0: the whole text."}
      );
  schema.section("checkpoint", "What is kept to go on from, and to sample from.")
      .bind(
          "every",
          &config.checkpoint.every,
          {.min = 0, .doc = "Steps between checkpoints; 0: none."}
      )
      .bind(
          "keep",
          &config.checkpoint.keep,
          {.min = 0, .doc = "Newest checkpoints that are kept; 0: all."}
      )
      .bind(
          "at_end",
          &config.checkpoint.at_end,
          {.doc = "Write one after the last step, and when the run is stopped."}
      );
  schema.section("log", "What a run tells.")
      .bind(
          "metrics",
          &config.log.metrics,
          {.doc = "File with one JSON object a step; empty takes <run.dir>/metrics.jsonl."}
      )
      .bind(
          "every",
          &config.log.every,
          {.min = 0,
           .doc = "Steps between progress lines where the line cannot be rewritten in place; 0: "
                  "no progress at all."}
      )
      .bind(
          "trace",
          &config.log.trace,
          {.doc = "File for a trace in Chrome's format (ui.perfetto.dev reads it); empty: none."}
      )
      .bind(
          "trace_first_step",
          &config.log.trace_first_step,
          {.min = 1,
           .max = std::int64_t{1} << 32,
           .doc = "First step that is traced, counted from the start of this process."}
      )
      .bind(
          "trace_steps",
          &config.log.trace_steps,
          {.min = 1,
           .max = std::int64_t{1} << 32,
           .doc = "Steps that are traced; 10 with `profile`, unless this key is given."}
      )
      .bind(
          "profile",
          &config.log.profile,
          {.doc = "Print where the time of the traced steps and the memory went, by part and by "
                  "module."}
      );
}

}  // namespace

model::GptConfig gpt_config(const RunConfig& config, std::int64_t vocab_size) {
  const ModelSection& model = config.model;
  return model::checked(
      {.vocab_size = vocab_size,
       .num_layers = model.layers,
       .dim = model.dim,
       .num_heads = model.heads,
       .num_kv_heads = model.kv_heads,
       .hidden_dim = model.hidden_dim,
       .max_sequence = model.sequence,
       .rope_theta = model.rope_theta,
       .norm_eps = model.norm_eps,
       .tie_embeddings = model.tie_embeddings,
       .recompute =
           model.recompute ? model::RecomputePolicy::kBlock : model::RecomputePolicy::kNone,
       .init_std = model.init_std}
  );
}

RunConfigFile::RunConfigFile() {
  bind_run(schema_, config_.run);
  bind_model(schema_, config_.model);
  bind_data(schema_, config_.data);
  internal::bind_parallel(schema_, config_.parallel);
  plan::bind_plan(schema_, &config_.plan);
  internal::bind_precision(schema_, config_.precision);
  bind_optimizer(schema_, config_.optimizer);
  bind_schedule(schema_, config_.schedule);
  bind_batch(schema_, config_.batch);
  bind_rest(schema_, config_);
  add_checks();
}

void RunConfigFile::add_checks() {
  schema_.add_check([this](ConfigProblems& problems) {
    if (config_.parallel.tp > 1 && !schema_.is_given("parallel.plan")) {
      config_.parallel.plan = {"tensor"};
    }
    internal::check_model(config_, problems);
    internal::check_text(config_, problems);
    internal::check_precision(config_, problems);
    internal::check_schedule(config_, problems);
    internal::check_layouts(config_.parallel.layouts, problems);
    internal::check_plan(config_, problems);
    internal::check_world(config_, world_size_, problems);
  });
}

void RunConfigFile::load(
    const std::string& path, std::span<const std::string> overrides, int world_size
) {
  world_size_ = world_size;
  schema_.load_file(path, overrides);
  finish(path);
}

void RunConfigFile::load_text(
    std::string_view text,
    const std::string& name,
    std::span<const std::string> overrides,
    int world_size
) {
  world_size_ = world_size;
  schema_.load_text(text, name, overrides);
  finish(name);
}

void RunConfigFile::finish(const std::string& name) {
  RunConfig& config = config_;
  if (config.run.name.empty()) {
    config.run.name = std::filesystem::path(name).stem().string();
  }
  if (config.run.dir.empty()) {
    config.run.dir = "runs/" + config.run.name;
  }
  const model::GptConfig shape = gpt_config(config, /*vocab_size=*/1);
  config.model.kv_heads = shape.num_kv_heads;
  config.model.hidden_dim = shape.hidden_dim;
  if (config.log.profile && !schema_.is_given("log.trace_steps")) {
    config.log.trace_steps = kProfiledSteps;
  }
  fill_from_environment();
}

// A key that says something wins over the variable.
void RunConfigFile::fill_from_environment() {
  RunConfig& config = config_;
  if (const std::int64_t seed = env::get_int("HS_SEED");
      seed >= 0 && !schema_.is_given("run.seed")) {
    config.run.seed = seed;
  }
  if (config.run.threads == 0) {
    config.run.threads = static_cast<int>(env::get_int("HS_THREADS"));
  }
  if (config.parallel.share == shard::Share::kAuto) {
    const std::string share = env::get_string("HS_SHARE");
    config.parallel.share = share == "on"    ? shard::Share::kOn
                            : share == "off" ? shard::Share::kOff
                                             : shard::Share::kAuto;
  }
  if (config.log.trace.empty()) {
    config.log.trace = env::get_string("HS_TRACE");
  }
}

}  // namespace hypershard::train
