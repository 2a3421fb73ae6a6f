// Why: the program is a list of subcommands; each lives in a file of its own and leaves here what
// is to be run once the command line has been read.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace CLI {  // NOLINT(readability-identifier-naming): the library's own
class App;
}

namespace hypershard::tools {

/// What the chosen subcommand does; returns the exit code.
using Action = std::function<int()>;

/// The command line as it was given, for starting ranks with the same one.
using Arguments = std::vector<std::string>;

void add_train(CLI::App& app, Action& action, const Arguments& arguments);
void add_data(CLI::App& app, Action& action);
void add_sample(CLI::App& app, Action& action);
void add_explain(CLI::App& app, Action& action);
void add_validate(CLI::App& app, Action& action, const Arguments& arguments);
void add_info(CLI::App& app, Action& action);

/// Prints a line to stdout.
void print_line(const std::string& line);
/// Prints `hypershard: error: ...` to stderr.
void print_error(const std::string& text);

}  // namespace hypershard::tools
