// `hypershard explain`: what a configuration will do, before it does it.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "tools/command.h"
#include <CLI/CLI.hpp>

#include "hypershard/data/prepare.h"
#include "hypershard/train/exit_code.h"
#include "hypershard/train/run_config.h"
#include "hypershard/train/run_plan.h"

namespace hypershard::tools {
namespace {

constexpr const char* kFooter =
    "Examples:\n"
    "  hypershard explain configs/gpt_shakespeare.toml --ranks 2\n"
    "  hypershard explain configs/gpt_shakespeare.toml --ranks 64 --vocab 32000 \\\n"
    "      --set model.layers=32 --set model.dim=4096 --set model.heads=32 \\\n"
    "      --set parallel.strategy=hsdp --set parallel.replicate=8 --set parallel.supernodes=8 \\\n"
    "      --set batch.global_batch=64\n"
    "\n"
    "Nothing is trained and no memory for weights is needed: the engine plans on ranks that do "
    "not\n"
    "exist. `--set parallel.share=off` shows what would be gathered where nothing can be shared.";

struct ExplainArguments {
  std::string config;
  int ranks = 1;
  int rank = 0;
  std::int64_t vocab = 0;
  std::vector<std::string> sets;
};

int run(const ExplainArguments& arguments) {
  train::RunConfigFile config;
  config.load(arguments.config, arguments.sets, arguments.ranks);
  const std::int64_t vocab = arguments.vocab > 0
                                 ? arguments.vocab
                                 : data::open_prepared(config.config().data.path).vocab_size;
  print_line(describe(train::plan_run(config.config(), vocab, arguments.ranks, arguments.rank)));
  return train::kExitOk;
}

}  // namespace

void add_explain(CLI::App& app, Action& action) {
  const auto arguments = std::make_shared<ExplainArguments>();
  CLI::App* command = app.add_subcommand(
      "explain",
      "Shows what a configuration will do: units, layouts, collectives and their bytes, memory."
  );
  command->footer(kFooter);
  command->add_option("CONFIG", arguments->config, "Configuration in TOML")->required();
  command->add_option("--ranks", arguments->ranks, "Ranks to plan for")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--rank", arguments->rank, "Rank whose part is shown")->capture_default_str();
  command
      ->add_option(
          "--vocab", arguments->vocab, "Size of the vocabulary, where there is no data to tell it"
      )
      ->check(CLI::Range(1, 1 << 30));
  command->add_option("--set", arguments->sets, "Override a key; may be given more than once")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false);
  command->callback([&action, arguments] { action = [arguments] { return run(*arguments); }; });
}

}  // namespace hypershard::tools
