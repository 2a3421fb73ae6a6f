// `hypershard train`: starts the ranks of a job, or is one of them.
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "tools/command.h"
#include <CLI/CLI.hpp>

#include "hypershard/comm/c10d/launch_env.h"
#include "hypershard/core/env.h"
#include "hypershard/core/error.h"
#include "hypershard/core/process.h"
#include "hypershard/train/launcher.h"
#include "hypershard/train/run_config.h"
#include "hypershard/train/run_folder.h"
#include "hypershard/train/session.h"
#include "hypershard/train/trace_window.h"
#include "hypershard/train/trainer.h"

namespace hypershard::tools {
namespace {

struct TrainArguments {
  std::string config;
  int ranks = 0;
  std::vector<std::string> sets;
  std::string resume;
  bool overwrite = false;
  std::string trace;
  bool profile = false;
  std::int64_t validate_every = 0;
  bool dry_run = false;
  Arguments command_line;
};

constexpr const char* kFooter =
    "With --ranks N it starts N ranks on this machine and watches over them. Without, and under\n"
    "torchrun --no-python, srun or mpirun, it is one rank of that job; alone, a job of one rank.\n"
    "\n"
    "Examples:\n"
    "  hypershard train configs/gpt_shakespeare.toml --ranks 2\n"
    "  hypershard train configs/gpt_shakespeare.toml --ranks 2 --set schedule.steps=100 \\\n"
    "      --set parallel.strategy=ddp --set run.dir=runs/ddp\n"
    "  hypershard train --resume runs/gpt_shakespeare --ranks 2\n"
    "  torchrun --nproc-per-node 2 --no-python hypershard train configs/gpt_shakespeare.toml\n"
    "  srun -n 8 hypershard train CONFIG.toml          (mpirun works the same way)\n"
    "\n"
    "A run's files are in run.dir (runs/NAME): config.toml with every value that was used,\n"
    "metrics.jsonl with one object a step, checkpoints/, run.json, log. docs/config.md lists all\n"
    "keys. Ctrl-C ends the run after the step, with a checkpoint; a second one ends it at once.";

// What the arguments mean, once everything they name has been looked at.
struct Plan {
  std::unique_ptr<train::RunConfigFile> config = std::make_unique<train::RunConfigFile>();
  train::FolderPolicy policy = train::FolderPolicy::kRefuse;
  std::string checkpoint;
};

Plan make_plan(const TrainArguments& arguments, int world_size) {
  Plan plan;
  std::vector<std::string> overrides = arguments.sets;
  std::string config = arguments.config;
  if (!arguments.resume.empty()) {
    const train::ResumePoint point = train::find_resume_point(arguments.resume);
    plan.policy = train::FolderPolicy::kResume;
    plan.checkpoint = point.checkpoint;
    if (config.empty()) {
      config = train::RunFolder(point.run_dir).config_path();
    }
    overrides.push_back("run.dir=" + toml_quoted(point.run_dir));
  } else if (arguments.overwrite) {
    plan.policy = train::FolderPolicy::kOverwrite;
  }
  HS_CHECK(
      !config.empty(),
      "train: neither a configuration nor --resume was given",
      HS_HINT("hypershard train CONFIG.toml --ranks N")
  );
  if (!arguments.trace.empty()) {
    overrides.push_back("log.trace=" + toml_quoted(arguments.trace));
  }
  if (arguments.profile) {
    overrides.push_back("log.profile=true");
  }
  if (arguments.validate_every > 0) {
    overrides.push_back("run.validate_every=" + std::to_string(arguments.validate_every));
  }
  plan.config->load(config, overrides, world_size);
  return plan;
}

// Finds what can be found wrong without any rank.
void check_before_start(const Plan& plan, int world_size) {
  const train::RunConfig& config = plan.config->config();
  train::RunFolder(config.run.dir).check(plan.policy);
  train::check_trace_folder(config);
  train::open_data(config, world_size);
}

int start_ranks(const TrainArguments& arguments, const Plan& plan) {
  train::LaunchOptions options;
  options.num_ranks = arguments.ranks;
  options.command = {program_path()};
  options.command.insert(
      options.command.end(), arguments.command_line.begin(), arguments.command_line.end()
  );
  const train::RunConfig& config = plan.config->config();
  options.pin_cores = config.run.pin_cores && config.run.threads == 0;
  options.log_path = train::RunFolder(config.run.dir).log_path();
  if (plan.policy != train::FolderPolicy::kResume) {
    std::error_code absent;
    std::filesystem::remove(options.log_path, absent);  // a former run's, which is to be replaced
  }
  const train::LaunchResult result = train::launch_ranks(options);
  if (!result.report.empty()) {
    print_error(result.report);
  }
  return result.exit_code;
}

int run(const TrainArguments& arguments) {
  const comm::LaunchInfo info = comm::parse_launch_env(comm::process_environment());
  const bool is_rank = info.launcher != comm::Launcher::kNone;
  const int world_size = is_rank ? info.world_size : std::max(1, arguments.ranks);
  HS_CHECK(
      !is_rank || arguments.ranks == 0 || arguments.ranks == world_size,
      "train: --ranks ",
      arguments.ranks,
      " was given to a rank of a job of ",
      world_size,
      " that ",
      info.launcher,
      " started",
      HS_HINT("leave --ranks away: the launcher says how many ranks there are")
  );
  const Plan plan = make_plan(arguments, world_size);
  if (!is_rank) {
    env::warn_unknown();
    check_before_start(plan, world_size);
    if (arguments.dry_run) {
      print_line(plan.config->to_toml());
      print_line("# Nothing is wrong with this configuration and its data.");
      return train::kExitOk;
    }
    if (world_size > 1) {
      return start_ranks(arguments, plan);
    }
  }
  install_stop_signals();
  return train::run_training(
      {.config = plan.config.get(), .folder_policy = plan.policy, .checkpoint = plan.checkpoint}
  );
}

}  // namespace

void add_train(CLI::App& app, Action& action, const Arguments& command_line) {
  const auto arguments = std::make_shared<TrainArguments>();
  arguments->command_line = command_line;
  CLI::App* command =
      app.add_subcommand("train", "Trains a model as CONFIG says, on one rank or many.");
  command->footer(kFooter);
  command->add_option(
      "CONFIG", arguments->config, "Configuration in TOML; may be left out with --resume"
  );
  command->add_option("--ranks", arguments->ranks, "Ranks to start on this machine")
      ->check(CLI::Range(1, 1 << 16));
  command
      ->add_option(
          "--set",
          arguments->sets,
          "Override a key, e.g. --set optimizer.lr=3e-4; may be given more than once"
      )
      ->type_name("KEY=VALUE")
      ->take_all()
      ->allow_extra_args(false);
  CLI::Option* resume = command->add_option(
      "--resume",
      arguments->resume,
      "Go on with a run: its folder (newest checkpoint) or one of its checkpoints"
  );
  resume->type_name("RUN");
  command->add_flag("--overwrite", arguments->overwrite, "Replace a run that is in run.dir already")
      ->excludes(resume);
  command->add_option("--trace", arguments->trace, "Write a trace of a few steps (log.trace)")
      ->type_name("FILE");
  command->add_flag(
      "--profile",
      arguments->profile,
      "Print where the time and the memory of a step went, by part and by module (log.profile), "
      "and write the trace, to run.dir/trace.json unless --trace says where"
  );
  command
      ->add_option(
          "--validate-every",
          arguments->validate_every,
          "Validate one step in so many, as `hypershard validate` does (run.validate_every)"
      )
      ->check(CLI::Range(1, 1 << 30))
      ->type_name("STEPS");
  command->add_flag(
      "--dry-run",
      arguments->dry_run,
      "Check everything, print the whole configuration, start nothing"
  );
  command->callback([&action, arguments] { action = [arguments] { return run(*arguments); }; });
}

}  // namespace hypershard::tools
