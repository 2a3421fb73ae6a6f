// `hypershard info`: what this build and this machine can do.
#include <cstdio>
#include <memory>
#include <string>

#include "tools/command.h"
#include <CLI/CLI.hpp>

#include <ATen/Version.h>
#include <torch/version.h>

#include "hypershard/comm/c10d/launch_env.h"
#include "hypershard/core/env.h"
#include "hypershard/core/process.h"
#include "hypershard/core/text.h"
#include "hypershard/dtensor/operator_table.h"
#include "hypershard/train/exit_code.h"
#include "hypershard/train/process_memory.h"
#include "hypershard/train/progress.h"
#include "hypershard/train/run_config.h"
#include "hypershard/train/run_facts.h"
#include "hypershard/train/version.h"

namespace hypershard::tools {
namespace {

const std::string kEnvTitle =
    "# Environment variables\n\n"
    "What `hypershard info env --markdown` prints; a test keeps this file current. Unknown "
    "variables\n"
    "that begin with `HS_` are warned of, malformed values refused. Where a key of the "
    "configuration\n"
    "says the same, the key wins if it is given in the file or by `--set`; the variable fills what "
    "is\n"
    "left open there (absent, empty, 0 or auto).\n\n";
const std::string kConfigTitle =
    "# Configuration\n\n"
    "What `hypershard info config --markdown` prints; a test keeps this file current. A "
    "configuration\n"
    "is a TOML file with these sections; `--set section.key=value` overrides a key.\n\n";

const std::string kOperatorsTitle =
    "# Operators with layout rules\n\n"
    "What `hypershard info operators --markdown` prints; a test keeps this file current. "
    "Rules of\n"
    "your own operators are added with `register_op_rule` "
    "(`hypershard/dtensor/op_rules.h`).\n\n";

void print_field(const char* name, const std::string& value) {
  char padded[24];
  std::snprintf(padded, sizeof padded, "%-12s", name);
  print_line(padded + value);
}

std::string tokenizers() {
#ifdef HS_HAS_SENTENCEPIECE
  return "byte, sentencepiece";
#else
  return "byte (built without sentencepiece)";
#endif
}

int print_info() {
  const comm::LaunchInfo place = comm::parse_launch_env(comm::process_environment());
  print_field("hypershard", train::version() + ", " + train::build_description());
  print_field("torch", TORCH_VERSION);
  print_field("cpu", train::cpu_name());
  print_field(
      "cores",
      concat_text(available_cores(), " for this process, kernels up to ", at::get_cpu_capability())
  );
  print_field("memory", train::short_bytes(train::total_memory_bytes()));
  print_field("host", host_name() + ", boot " + boot_id());
  print_field(
      "job",
      place.launcher == comm::Launcher::kNone
          ? std::string("none: `hypershard train` would be a job of one rank, or start --ranks")
          : concat_text(
                "rank ",
                place.rank,
                " of ",
                place.world_size,
                ", started by ",
                place.launcher,
                ", local rank ",
                place.local_rank,
                " of ",
                place.local_world_size
            )
  );
  print_field(
      "topology",
      "ranks of one host form a supernode; HS_SUPERNODE and parallel.supernodes override"
  );
  print_field(
      "back ends",
      "shm (inside a supernode), c10d:gloo (between, or everywhere by parallel.backend)"
  );
  print_field("strategies", "ddp, zero1, zero2, zero3 (fsdp), hsdp, hierarchical");
  print_field("optimizers", "adamw, sgd");
  print_field("tokenizers", tokenizers());
  return train::kExitOk;
}

}  // namespace

void add_info(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand(
      "info",
      "Describes this build and machine; `info env`, `info config` and `info operators` list "
      "variables, "
      "keys and operators."
  );
  command->require_subcommand(0, 1);
  const auto markdown = std::make_shared<bool>(false);
  const auto add_table = [&](const char* name, const char* text, auto describe) {
    CLI::App* table = command->add_subcommand(name, text);
    table->add_flag("--markdown", *markdown, "As Markdown: the text of the file in docs/");
    table->callback([&action, markdown, describe] {
      action = [markdown, describe] {
        print_line(describe(*markdown));
        return static_cast<int>(train::kExitOk);
      };
    });
  };
  add_table("env", "Lists every environment variable with its value.", [](bool as_markdown) {
    return as_markdown ? kEnvTitle + env::describe_markdown() : env::describe();
  });
  add_table("config", "Lists every key of a configuration.", [](bool as_markdown) {
    const train::RunConfigFile file;
    return as_markdown ? kConfigTitle + file.schema().describe_markdown()
                       : file.schema().describe();
  });
  add_table("operators", "Lists the operators that have layout rules.", [](bool as_markdown) {
    return (as_markdown ? kOperatorsTitle : "") + dtensor::describe_operators(as_markdown);
  });
  command->callback([&action, command] {
    if (command->get_subcommands().empty()) {
      action = print_info;
    }
  });
}

}  // namespace hypershard::tools
