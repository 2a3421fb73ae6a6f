// What the engine itself costs: a chain of many tiny units, sharded, against the same chain plain.
// One rank of a job; benchmarks/engine starts them. Prints one JSON line on rank 0, in microseconds
// of this thread's CPU time for a unit and pass (forward, backward), optimizer and clipping left
// out. What it spent spinning, because the other rank was not there yet, is told apart.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <time.h>
#include <vector>

#include <nlohmann/json.hpp>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/pimpl.h>

#include "hypershard/comm/world.h"
#include "hypershard/core/error.h"
#include "hypershard/nn/hooks.h"
#include "hypershard/nn/rms_norm.h"
#include "hypershard/shard/fully_shard.h"
#include "hypershard/train/comm_meter.h"
#include "hypershard/train/process_memory.h"

namespace hypershard::bench {
namespace {

constexpr int kUnits = 1000;
constexpr std::int64_t kElements = 1000;

struct ChainImpl : nn::Hookable<ChainImpl, at::Tensor(const at::Tensor&), torch::nn::Module> {
  ChainImpl() {
    for (int i = 0; i < kUnits; ++i) {
      blocks->push_back(nn::RmsNorm(kElements));
    }
    register_module("blocks", blocks);
  }
  at::Tensor forward_impl(const at::Tensor& x) {
    at::Tensor y = x;
    for (const auto& block : *blocks) {
      y = block->as<nn::RmsNormImpl>()->forward(y);
    }
    return y;
  }
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(Chain);

double thread_cpu_us() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

/// Returns CPU time of `body`, less what `idle_us` counts meanwhile.
template <class Body, class Idle>
std::vector<double> measure(int steps, const Body& body, const Idle& idle_us) {
  std::vector<double> samples;
  for (int step = -3; step < steps; ++step) {
    const double begin = thread_cpu_us() - idle_us();
    body();
    if (step >= 0) {
      samples.push_back(thread_cpu_us() - idle_us() - begin);
    }
  }
  std::sort(samples.begin(), samples.end());
  return samples;
}

nlohmann::ordered_json a_unit(const std::vector<double>& sorted, double base_us) {
  constexpr double kPasses = 2.0 * kUnits;
  const double median = sorted[sorted.size() / 2];
  return {
      {"min", (sorted.front() - base_us) / kPasses},
      {"median", (median - base_us) / kPasses},
      {"n", sorted.size()}
  };
}

int run(int steps) {
  train::keep_freed_memory();
  at::set_num_threads(1);
  const auto world = comm::World::join();
  {
    const at::Tensor x = at::ones({kElements});
    Chain plain;
    const auto plain_us = measure(
        steps,
        [&] {
          plain->forward(x).sum().backward();
          plain->zero_grad();
        },
        [] { return 0.0; }
    );
    Chain model;
    const comm::ProcessMesh mesh(
        world, layout::DeviceMesh({{"shard", world->size()}}, world->topology())
    );
    shard::FullyShardOptions options;
    options.units = {"blocks.*"};
    const shard::ShardedModel sharded = shard::fully_shard(*model, mesh, options);
    const train::CommMeter meter(sharded, mesh, *world->world_communicator());
    const auto spun_us = [&] {
      const comm::CommStats stats = meter.stats(layout::Tier::kIntra);
      return static_cast<double>(stats.wait_ns - stats.asleep_ns) * 1e-3;
    };
    const double spun_before_us = spun_us();
    const auto sharded_us = measure(
        steps,
        [&] {
          model->forward(x).sum().backward();
          sharded.zero_grad();
        },
        spun_us
    );
    const double spun_a_pass_us = (spun_us() - spun_before_us) / (2.0 * kUnits * (steps + 3));
    if (world->rank() == 0) {
      const nlohmann::ordered_json result{
          {"units", kUnits},
          {"ranks", world->size()},
          {"engine_us", a_unit(sharded_us, plain_us[plain_us.size() / 2])},
          {"plain_us", a_unit(plain_us, 0)},
          {"spun_us", spun_a_pass_us},
      };
      std::printf("%s\n", result.dump().c_str());
      std::fflush(stdout);
    }
  }
  world->shutdown();
  return 0;
}

}  // namespace
}  // namespace hypershard::bench

int main(int argc, char** argv) {
  try {
    return hypershard::bench::run(argc > 1 ? std::atoi(argv[1]) : 20);
  } catch (const hypershard::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
