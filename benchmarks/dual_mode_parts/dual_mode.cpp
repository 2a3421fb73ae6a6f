// What plans cost in production, in validation and to resolve. One rank of a job;
// benchmarks/dual_mode starts them. Usage: dual_mode_bench step|validation|mlp DIM|resolve, then
// the number of repeats.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cases.h"

#include <ATen/Parallel.h>

#include "hypershard/core/error.h"
#include "hypershard/train/process_memory.h"

namespace hypershard::bench {

Spread summary(std::vector<double> samples, double scale) {
  std::sort(samples.begin(), samples.end());
  return {
      .min = samples.front() * scale,
      .median = samples[samples.size() / 2] * scale,
      .n = samples.size()
  };
}

namespace {

void print(const std::string& result) {
  std::printf("%s\n", result.c_str());
  std::fflush(stdout);
}

std::string run_on(
    const std::shared_ptr<comm::World>& world, const std::vector<std::string>& words, int repeats
) {
  if (words[0] == "step") {
    return measure_step(world, repeats);
  }
  if (words[0] == "validation") {
    return measure_validation(world, repeats);
  }
  HS_CHECK(
      words[0] == "mlp" && words.size() == 3,
      "bench: unknown case '",
      words[0],
      "' (expected step N, validation N, mlp DIM N or resolve N)"
  );
  return measure_mlp(world, std::atoll(words[1].c_str()), repeats);
}

int run(const std::vector<std::string>& words) {
  train::keep_freed_memory();
  at::set_num_threads(1);
  HS_CHECK(words.size() >= 2, "bench: a case and the number of repeats are needed");
  const int repeats = std::atoi(words.back().c_str());
  if (words[0] == "resolve") {
    print(measure_resolve(repeats));
    return 0;
  }
  const auto world = comm::World::join();
  const std::string result = run_on(world, words, repeats);
  if (world->rank() == 0) {
    print(result);
  }
  world->shutdown();
  return 0;
}

}  // namespace
}  // namespace hypershard::bench

int main(int argc, char** argv) {
  try {
    return hypershard::bench::run({argv + 1, argv + argc});
  } catch (const hypershard::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
