// The `hypershard` program: reads the command line, runs one subcommand, and turns every failure
// into a message and an exit code.
#include <csignal>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "tools/command.h"
#include <CLI/CLI.hpp>

#include <c10/util/Logging.h>
#include <torch/version.h>

#include "hypershard/core/env.h"
#include "hypershard/core/error.h"
#include "hypershard/core/suggest.h"
#include "hypershard/train/agreement.h"
#include "hypershard/train/exit_code.h"
#include "hypershard/train/step_check.h"
#include "hypershard/train/version.h"

namespace hypershard::tools {

void print_line(const std::string& line) {
  std::fprintf(stdout, "%s\n", line.c_str());
  std::fflush(stdout);
}

void print_error(const std::string& text) {
  // One write, so that the lines of several ranks do not mix.
  const std::string line = "hypershard: error: " + text + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
}

namespace {

constexpr const char* kDescription =
    "Trains large models on many ranks with sharded parameters.\n"
    "\n"
    "  hypershard data text PATH... --out DIR      prepare text\n"
    "  hypershard explain CONFIG --ranks N         see the plan before running it\n"
    "  hypershard validate CONFIG --ranks N        prove that it computes what the model says\n"
    "  hypershard train CONFIG --ranks N           train\n"
    "  hypershard sample RUN                       let the model write\n"
    "  hypershard info                             what this build and machine can do\n";

constexpr const char* kFooter =
    "Exit codes: 0 done, 1 validation found a step wrong, 2 bad input or file, 3 communication "
    "failed\n"
    "or a rank died, 4 internal error, 130 stopped by Ctrl-C, SIGTERM or SIGHUP. `hypershard "
    "COMMAND\n"
    "--help` says more.";

int run_action(const Action& action) {
  try {
    return action();
  } catch (const train::FoundWrong& wrong) {
    if (error_rank().rank <= 0) {
      print_error(wrong.what());
    }
    return train::kExitFoundWrong;
  } catch (const train::AgreedFailure& failure) {
    // All ranks know the same; one of them says so.
    if (error_rank().rank <= 0) {
      print_error(failure.what());
    }
    return train::exit_code_of(failure.code());
  } catch (const std::exception& error) {
    const train::LocalFailure failure = train::failure_of(error);
    print_error(failure.text);
    return train::exit_code_of(failure.code);
  }
}

// Returns the subcommand that was chosen, the innermost one.
const CLI::App* chosen_command(const CLI::App& app) {
  const CLI::App* command = &app;
  while (!command->get_subcommands().empty()) {
    command = command->get_subcommands().front();
  }
  return command;
}

// Says what was meant by an argument that there is not.
std::string unknown_argument(const CLI::App& command, const std::string& argument) {
  std::vector<std::string> known;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      known.push_back("--" + name);
    }
  }
  for (const CLI::App* each : command.get_subcommands([](const CLI::App*) { return true; })) {
    known.push_back(each->get_name());
  }
  const std::string meant = suggestion(argument, known);
  return "unknown argument '" + argument + "'\n  hint: " +
         (meant.empty() ? "`" + command.get_name() + " --help` lists what there is" : meant);
}

int parse(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
    return train::kExitOk;
  } catch (const CLI::ExtrasError&) {
    const CLI::App* command = chosen_command(app);
    print_error(unknown_argument(*command, command->remaining().front()));
  } catch (const CLI::Success& success) {
    app.exit(success);  // prints help or version
    return -1;
  } catch (const CLI::ParseError& error) {
    print_error(
        std::string(error.what()) + "\n  hint: `" + chosen_command(app)->get_name() +
        " --help` says more"
    );
  }
  return train::kExitBadInput;
}

int main_of(int argc, char** argv) {
  CLI::App app(kDescription, "hypershard");
  app.footer(kFooter);
  app.set_version_flag(
      "--version", "hypershard " + train::version() + " (torch " TORCH_VERSION ")"
  );
  Action action;
  add_train(app, action, Arguments(argv + 1, argv + argc));
  add_data(app, action);
  add_sample(app, action);
  add_explain(app, action);
  add_validate(app, action, Arguments(argv + 1, argv + argc));
  add_info(app, action);
  if (const int code = parse(app, argc, argv); code != train::kExitOk) {
    return code < 0 ? train::kExitOk : code;
  }
  if (!action) {
    print_line(app.help());
    return train::kExitBadInput;
  }
  return run_action([&] {
    env::check_all();
    return action();
  });
}

}  // namespace
}  // namespace hypershard::tools

int main(int argc, char** argv) {
  // Whoever reads our output may go away; the run goes on, and writes fail with an error instead.
  std::signal(SIGPIPE, SIG_IGN);
  // libtorch would abort where memory is short; an exception ends the run in order.
  FLAGS_caffe2_use_fatal_for_enforce = false;
  return hypershard::tools::main_of(argc, argv);
}
