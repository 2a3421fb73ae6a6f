// The `hypershard` program: reads the command line, runs one subcommand, and turns every failure
// into a message and an exit code.
#include <csignal>
#include <cstdio>
#include <exception>
#include <string>

#include "tools/command.h"
#include <CLI/CLI.hpp>

#include <c10/util/Exception.h>
#include <torch/version.h>

#include "hypershard/core/env.h"
#include "hypershard/core/error.h"
#include "hypershard/train/agreement.h"
#include "hypershard/train/exit_code.h"
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
    "  hypershard train CONFIG --ranks N           train\n"
    "  hypershard sample RUN                       let the model write\n"
    "  hypershard info                             what this build and machine can do\n";

constexpr const char* kFooter =
    "Exit codes: 0 done, 2 bad input or file, 3 communication failed or a rank died, 4 internal\n"
    "error, 130 stopped by Ctrl-C or SIGTERM. `hypershard COMMAND --help` says more.";

int run_action(const Action& action) {
  using train::ExitCode;
  try {
    return action();
  } catch (const train::AgreedFailure& failure) {
    // All ranks know the same; one of them says so.
    if (error_rank().rank <= 0) {
      print_error(failure.what());
    }
    return train::exit_code_of(failure.code());
  } catch (const Error& error) {
    print_error(train::user_text(error));
    return train::exit_code_of(error.code());
  } catch (const c10::Error& error) {
    print_error(error.what_without_backtrace());
    return ExitCode::kExitInternal;
  } catch (const std::exception& error) {
    print_error(error.what());
    return ExitCode::kExitInternal;
  }
}

int main_of(int argc, char** argv) {
  CLI::App app(kDescription, "hypershard");
  app.footer(kFooter);
  app.set_version_flag(
      "--version", "hypershard " + train::version() + " (torch " TORCH_VERSION ")"
  );
  app.require_subcommand(1);
  app.failure_message(CLI::FailureMessage::help);
  Action action;
  const Arguments arguments(argv + 1, argv + argc);
  add_train(app, action, arguments);
  add_data(app, action);
  add_sample(app, action);
  add_explain(app, action);
  add_info(app, action);
  app.failure_message([](const CLI::App* failed, const CLI::Error& error) {
    return "hypershard: error: " + std::string(error.what()) + "\n  hint: `" + failed->get_name() +
           " --help` lists what there is\n";
  });
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    return code == 0 ? train::kExitOk : train::kExitBadInput;
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
  return hypershard::tools::main_of(argc, argv);
}
