// `hypershard validate`: proves that a configuration computes what its model says.
#include "hypershard/train/validate.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "tools/command.h"
#include <CLI/CLI.hpp>

#include "hypershard/comm/c10d/launch_env.h"
#include "hypershard/core/env.h"
#include "hypershard/core/error.h"
#include "hypershard/core/process.h"
#include "hypershard/train/launcher.h"
#include "hypershard/train/run_config.h"
#include "hypershard/train/session.h"

namespace hypershard::tools {
namespace {

constexpr const char* kFooter =
    "The first steps of the run, with the layouts of every operator carried along and checked, "
    "all\n"
    "ranks compared, and each parameter's gradient laid beside that of the same step on one rank.\n"
    "Nothing is written. Exit code 0: right; 1: found wrong, with module, operator, layouts and "
    "fix.\n"
    "\n"
    "Examples:\n"
    "  hypershard validate configs/gpt_shakespeare.toml --ranks 2\n"
    "  hypershard validate configs/gpt_shakespeare.toml --ranks 4 --set parallel.tp=2 --steps 3\n"
    "  hypershard validate CONFIG.toml --ranks 2 --vocab 512 --set precision.compute=fp64";

struct ValidateArguments {
  std::string config;
  int ranks = 0;
  std::int64_t steps = 1;
  std::int64_t vocab = 0;
  std::vector<std::string> sets;
  Arguments command_line;
};

int start_ranks(const ValidateArguments& arguments, const train::RunConfig& config) {
  train::LaunchOptions options;
  options.num_ranks = arguments.ranks;
  options.command = {program_path()};
  options.command.insert(
      options.command.end(), arguments.command_line.begin(), arguments.command_line.end()
  );
  options.pin_cores = config.run.pin_cores && config.run.threads == 0;
  const train::LaunchResult result = train::launch_ranks(options);
  if (!result.report.empty()) {
    print_error(result.report);
  }
  return result.exit_code;
}

int run(const ValidateArguments& arguments) {
  const comm::LaunchInfo info = comm::parse_launch_env(comm::process_environment());
  const bool is_rank = info.launcher != comm::Launcher::kNone;
  const int world_size = is_rank ? info.world_size : std::max(1, arguments.ranks);
  train::RunConfigFile config;
  config.load(arguments.config, arguments.sets, world_size);
  if (!is_rank) {
    env::warn_unknown();
    if (arguments.vocab == 0) {
      train::open_data(config.config(), world_size);
    }
    if (world_size > 1) {
      return start_ranks(arguments, config.config());
    }
  }
  install_stop_signals();
  return train::run_validation(
      {.config = &config,
       .steps = arguments.steps,
       .random_vocab = arguments.vocab,
       .print = print_line}
  );
}

}  // namespace

void add_validate(CLI::App& app, Action& action, const Arguments& command_line) {
  const auto arguments = std::make_shared<ValidateArguments>();
  arguments->command_line = command_line;
  CLI::App* command = app.add_subcommand(
      "validate", "Checks that steps under CONFIG are what one rank without sharding would do."
  );
  command->footer(kFooter);
  command->add_option("CONFIG", arguments->config, "Configuration in TOML")->required();
  command->add_option("--ranks", arguments->ranks, "Ranks to start on this machine")
      ->check(CLI::Range(1, 1 << 16));
  command->add_option("--steps", arguments->steps, "Steps to validate")
      ->check(CLI::Range(1, 1 << 30))
      ->capture_default_str();
  command
      ->add_option(
          "--vocab",
          arguments->vocab,
          "Validate on random tokens of a vocabulary of this size, instead of the data"
      )
      ->check(CLI::Range(1, 1 << 30));
  command->add_option("--set", arguments->sets, "Override a key; may be given more than once")
      ->type_name("KEY=VALUE")
      ->take_all()
      ->allow_extra_args(false);
  command->callback([&action, arguments] { action = [arguments] { return run(*arguments); }; });
}

}  // namespace hypershard::tools
