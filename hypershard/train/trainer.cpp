// Why: see trainer.h. The loop is a class because its parts share a dozen values; each part is a
// short function.
#include "hypershard/train/trainer.h"

#include <cstdio>
#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <unistd.h>
#include <utility>

#include <ATen/ops/zeros.h>

#include "hypershard/checkpoint/checkpoint.h"
#include "hypershard/comm/c10d/process_world.h"
#include "hypershard/core/clock.h"
#include "hypershard/core/error.h"
#include "hypershard/core/log.h"
#include "hypershard/core/process.h"
#include "hypershard/core/trace.h"
#include "hypershard/core/trace_shares.h"
#include "hypershard/data/tokenizer.h"
#include "hypershard/model/gpt.h"
#include "hypershard/optim/optimizer.h"
#include "hypershard/shard/engine.h"
#include "hypershard/train/agreement.h"
#include "hypershard/train/evaluate.h"
#include "hypershard/train/exit_code.h"
#include "hypershard/train/gemm_peak.h"
#include "hypershard/train/metrics.h"
#include "hypershard/train/module_spans.h"
#include "hypershard/train/process_memory.h"
#include "hypershard/train/profile.h"
#include "hypershard/train/progress.h"
#include "hypershard/train/run_facts.h"
#include "hypershard/train/run_plan.h"
#include "hypershard/train/session.h"
#include "hypershard/train/step.h"
#include "hypershard/train/step_check.h"
#include "hypershard/train/step_meter.h"
#include "hypershard/train/trace_window.h"

namespace hypershard::train {
namespace {

std::string four_decimals(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4f", value);
  return text;
}

class Trainer {
 public:
  Trainer(const TrainRequest& request, std::shared_ptr<comm::World> world)
      : request_(request), world_(std::move(world)), folder_(config().run.dir) {}

  /// Collective. Returns the exit code.
  int run();

 private:
  const RunConfig& config() const { return request_.config->config(); }
  bool is_first() const { return world_->rank() == 0; }
  bool is_due(std::int64_t every) const { return every > 0 && step_ % every == 0; }
  bool is_last() const { return step_ == config().schedule.steps; }

  void set_up();
  void open_folder();
  void load_or_initialize();
  void measure_peak();
  void announce();
  void train();
  StepResult step();
  void report(StepMetrics metrics, const std::optional<Evaluation>& evaluation);
  bool evaluation_is_due() const;
  std::optional<Evaluation> evaluate_if_due();
  void evaluate_at_start();
  void open_trace_window();
  void report_profile();
  void save_checkpoint();
  void finish();

  const TrainRequest& request_;
  std::shared_ptr<comm::World> world_;
  RunFolder folder_;
  std::optional<Session> session_;
  std::optional<StepMeter> meter_;
  std::optional<MetricsWriter> metrics_;     // rank 0
  std::optional<ProgressPrinter> progress_;  // rank 0
  std::optional<TraceWindow> trace_;
  RunFacts facts_;
  LocalFailure failure_;         // of rank 0's files, told to all in the next step
  std::int64_t step_ = 0;        // steps done
  std::int64_t first_step_ = 0;  // steps done when this process began
  std::int64_t saved_step_ = -1;
  bool stopped_ = false;
  Stopwatch since_start_;
  std::optional<double> eval_loss_;
  std::int64_t process_bytes_ = 0;  ///< resident before the model was made
  bool has_profile_ = false;
};

int Trainer::run() {
  set_up();
  train();
  finish();
  return stopped_ && !is_last() ? kExitInterrupted : kExitOk;
}

void Trainer::set_up() {
  comm::Communicator& everyone = *world_->world_communicator();
  process_bytes_ = resident_bytes();
  set_up_process(config(), comm::launch_info(*world_).local_world_size);
  agree_on_config(everyone, request_.config->to_toml());
  run_on_first(everyone, [&] { folder_.check(request_.folder_policy); });
  TrainingData data;
  run_together(everyone, [&] { data = open_data(config(), world_->size()); });
  run_together(everyone, [&] {
    session_.emplace(
        config(),
        world_,
        std::move(data),
        SessionOptions{.validates = config().run.validate_every > 0}
    );
  });
  run_together(everyone, [&] { load_or_initialize(); });
  // Before a former run's files go: where the trace cannot be written, nothing is lost.
  run_together(everyone, [&] { open_trace_window(); });
  run_on_first(everyone, [&] { open_folder(); });
  meter_.emplace(*session_);
  measure_peak();
  run_on_first(everyone, [&] { announce(); });
}

void Trainer::open_trace_window() {
  if (config().trace_path().empty()) {
    return;
  }
  trace_.emplace(config(), *world_);
  std::vector<std::string> units;
  for (const auto& unit : session_->sharded().engine().units()) {
    units.push_back(unit->path());
  }
  add_module_spans(session_->model(), units);
}

void Trainer::load_or_initialize() {
  if (request_.checkpoint.empty()) {
    session_->initialize();
    return;
  }
  const checkpoint::TrainState state = checkpoint::load(
      request_.checkpoint, session_->sharded(), &session_->optimizer(), session_->mesh()
  );
  HS_CHECK(
      state.step <= config().schedule.steps,
      "train.resume: '",
      request_.checkpoint,
      "' was written after step ",
      state.step,
      ", beyond schedule.steps = ",
      config().schedule.steps,
      HS_HINT("raise schedule.steps, or go on from an earlier checkpoint")
  );
  step_ = first_step_ = saved_step_ = state.step;
}

void Trainer::open_folder() {
  folder_.prepare(request_.folder_policy);
  write_text_file(folder_.config_path(), request_.config->to_toml());
  data::load_tokenizer(session_->data().prepared.dir)->save(folder_.path());
  metrics_.emplace(config().metrics_path(), step_);
  progress_.emplace(STDOUT_FILENO, config().log.every);
}

void Trainer::measure_peak() {
  // A resumed run keeps the peak that it began with, so that its MFU does not jump.
  if (is_first() && request_.folder_policy == FolderPolicy::kResume) {
    facts_ = read_facts_if_any(folder_.facts_path());
  }
  at::Tensor known = at::zeros({1}, at::kDouble);
  *known.mutable_data_ptr<double>() =
      facts_.world_size == world_->size() ? facts_.gemm_peak_flops_per_s : 0;
  session_->everyone().broadcast(known, 0, "train.gemm_peak")->wait();
  GemmPeak peak{.flops_per_s = *known.const_data_ptr<double>()};
  if (peak.flops_per_s == 0) {
    const std::int64_t rows = config().batch.global_batch * config().model.sequence /
                              (config().batch.accumulation * session_->num_data_ranks());
    const bool cuts_columns = config().parallel.has_plan("tensor");
    peak = measure_gemm_peak(
        session_->everyone(),
        {.rows = rows,
         .inner = session_->shape().dim,
         .columns = session_->shape().hidden_dim / (cuts_columns ? config().parallel.tp : 1)},
        compute_dtype(config())
    );
    facts_.gemm_dtype = peak.dtype;
    facts_.gemm_shape = {peak.shape.rows, peak.shape.inner, peak.shape.columns};
  }
  facts_.gemm_peak_flops_per_s = peak.flops_per_s;
  meter_->set_gemm_peak(peak.flops_per_s);
}

void Trainer::announce() {
  fill_facts(facts_, *session_);
  write_text_file(folder_.facts_path(), to_json(facts_) + "\n");
  if (config().log.every > 0) {
    for (const std::string& line : describe_facts(facts_, *session_)) {
      progress_->print(line);
    }
    if (first_step_ > 0) {
      progress_->print(concat_text("going on after step ", first_step_));
    }
  }
}

void Trainer::train() {
  since_start_.restart();
  evaluate_at_start();
  while (!is_last() && !stopped_) {
    if (trace_) {
      trace_->begin_step(step_ - first_step_ + 1);
    }
    meter_->begin();
    StepResult result;
    StepMetrics metrics;
    {
      const TraceSpan span(TraceLane::kOther, kStepSpan);
      const Stopwatch watch;
      result = step();
      ++step_;
      const double step_s = watch.elapsed_s();
      const bool with_job_memory = step_ == first_step_ + 1 || is_last() || evaluation_is_due();
      metrics = meter_->measure(step_, result, step_s, with_job_memory);
    }
    stopped_ = result.stop;
    const std::optional<Evaluation> evaluation = evaluate_if_due();
    failure_ = catch_failure([&] { report(metrics, evaluation); });
    if (is_due(config().checkpoint.every)) {
      save_checkpoint();
    }
    if (trace_ && trace_->end_step(step_ - first_step_)) {
      report_profile();
    }
  }
}

StepResult Trainer::step() {
  const std::int64_t every = config().run.validate_every;
  if (every == 0 || (step_ + 1) % every != 0) {
    return run_step(*session_, step_, failure_);
  }
  StepCheck check(*session_);
  const StepResult result = run_step(*session_, step_, failure_, &check);
  if (is_first() && config().log.every > 0) {
    progress_->print(to_text(check.verdict()));
  }
  require_passed(*session_, check.verdict());
  return result;
}

bool Trainer::evaluation_is_due() const {
  const TrainingData& data = session_->data();
  return is_last() ? data.final_evaluation.has_value()
                   : data.evaluation && is_due(config().eval.every) && !stopped_;
}

std::optional<Evaluation> Trainer::evaluate_if_due() {
  if (!evaluation_is_due()) {
    return std::nullopt;
  }
  const TrainingData& data = session_->data();
  return evaluate(*session_, is_last() ? *data.final_evaluation : *data.evaluation);
}

// The loss that a run begins with says whether it begins right: ln(vocabulary), or where it was.
void Trainer::evaluate_at_start() {
  if (!config().eval.at_start || !session_->data().evaluation || is_last()) {
    return;
  }
  const Evaluation before = evaluate(*session_, *session_->data().evaluation);
  if (is_first() && config().log.every > 0) {
    progress_->print(
        "before " + four_decimals(before.nats_a_byte) + " nats a byte on " +
        std::to_string(before.num_tokens) + " held-out tokens"
    );
  }
}

void Trainer::report(StepMetrics metrics, const std::optional<Evaluation>& evaluation) {
  if (!is_first()) {
    return;
  }
  if (evaluation) {
    metrics.eval_loss = evaluation->loss;
    metrics.eval_nats_a_byte = evaluation->nats_a_byte;
    eval_loss_ = evaluation->nats_a_byte;
  }
  metrics_->write(metrics);
  const double per_step_s = since_start_.elapsed_s() / static_cast<double>(step_ - first_step_);
  const ProgressState state{
      .steps = config().schedule.steps,
      .eval_loss = eval_loss_,
      .remaining_s = per_step_s * static_cast<double>(config().schedule.steps - step_)
  };
  progress_->show(metrics, state, evaluation.has_value() || is_last() || step_ == first_step_ + 1);
}

void Trainer::report_profile() {
  has_profile_ = true;
  if (!is_first() || !config().log.profile) {
    return;
  }
  const RunPlan plan = plan_run(config(), session_->shape().vocab_size, world_->size());
  const MemoryUse memory{
      .process = process_bytes_,
      .peak = peak_resident_bytes(),
      .job = meter_->job_bytes(),
      .plan = plan.memory
  };
  progress_->print(describe(make_profile(trace_shares(0, kStepSpan), memory)));
}

void Trainer::save_checkpoint() {
  const TraceSpan span(TraceLane::kCheckpoint, "save");
  run_together(session_->everyone(), [&] {
    checkpoint::save(
        folder_.checkpoint_dir(),
        session_->sharded(),
        &session_->optimizer(),
        {.step = step_,
         .seed = static_cast<std::uint64_t>(config().run.seed),
         .config_toml = request_.config->to_toml()},
        session_->mesh()
    );
  });
  saved_step_ = step_;
  run_on_first(session_->everyone(), [&] {
    checkpoint::prune(folder_.checkpoint_dir(), config().checkpoint.keep);
  });
}

void Trainer::finish() {
  agree(session_->everyone(), failure_);
  if (config().checkpoint.at_end && saved_step_ != step_) {
    save_checkpoint();
  }
  if (trace_ && !has_profile_) {
    report_profile();  // the run ended inside the window
  }
  if (trace_) {
    trace_->write(session_->everyone());
  }
  if (is_first() && config().log.every > 0) {
    progress_->finish();
    progress_->print(concat_text(
        stopped_ && !is_last() ? "stopped after step " : "done: step ",
        step_,
        " in ",
        short_duration(since_start_.elapsed_s()),
        eval_loss_ ? ", held-out loss " + four_decimals(*eval_loss_) + " nats a byte"
                   : std::string(),
        meter_->job_bytes() > 0
            ? concat_text(", memory of the job ", short_bytes(meter_->job_bytes()))
            : std::string()
    ));
  }
}

}  // namespace

int run_training(const TrainRequest& request) {
  const std::shared_ptr<comm::World> world = join_world(request.config->config());
  try {
    int exit_code = kExitOk;
    {
      Trainer trainer(request, world);
      exit_code = trainer.run();
    }
    world->shutdown();
    return exit_code;
  } catch (const AgreedFailure&) {
    world->shutdown();
    throw;
  } catch (const std::exception& error) {
    comm::report_failure(*world, error.what());
    throw;
  }
}

}  // namespace hypershard::train
