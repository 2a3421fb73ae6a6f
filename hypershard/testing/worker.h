// Lets a test binary start itself again as another process: the tests that need real processes
// respawn their own file with `--worker NAME`, since libtorch's threads do not survive a fork.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace hypershard::testing {

/// Runs one worker with the arguments that follow its name; the result is the exit code.
using WorkerFunction = std::function<int(const std::vector<std::string>& arguments)>;

/// Registers `function` as what `<binary> --worker name [arguments...]` runs instead of the tests.
///
/// Threads: call before main, from the initializer of a namespace-scope variable.
/// Errors:  aborts when `name` is already taken, since nobody can catch before main.
/// @returns true, so that the call can initialize a variable.
bool register_worker(const std::string& name, WorkerFunction function);

/// Runs the registered worker `name`; an unknown name prints the known ones and returns 64.
int run_worker(const std::string& name, const std::vector<std::string>& arguments);

}  // namespace hypershard::testing
