// The registry behind `--worker`. It is filled before main, so it lives in a function.
#include "hypershard/testing/worker.h"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <utility>

namespace hypershard::testing {
namespace {

constexpr int kUnknownWorker = 64;
constexpr int kWorkerThrew = 70;

std::map<std::string, WorkerFunction>& registry() {
  static std::map<std::string, WorkerFunction> workers;
  return workers;
}

}  // namespace

bool register_worker(const std::string& name, WorkerFunction function) {
  if (!registry().emplace(name, std::move(function)).second) {
    std::fprintf(stderr, "register_worker: '%s' is registered twice\n", name.c_str());
    std::abort();
  }
  return true;
}

int run_worker(const std::string& name, const std::vector<std::string>& arguments) {
  const auto found = registry().find(name);
  if (found == registry().end()) {
    std::fprintf(stderr, "--worker: unknown worker '%s'; this binary has:\n", name.c_str());
    for (const auto& [known, function] : registry()) {
      std::fprintf(stderr, "  %s\n", known.c_str());
    }
    return kUnknownWorker;
  }
  try {
    return found->second(arguments);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "worker '%s' threw: %s\n", name.c_str(), error.what());
    return kWorkerThrew;
  }
}

}  // namespace hypershard::testing
