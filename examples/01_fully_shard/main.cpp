// Shards a small model over ranks and trains it: mesh, fully_shard, optimizer, loop.
// Run:       ./example_01_fully_shard --ranks 4
// Last line: largest difference from one process: <a small number> (ok)
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include <torch/torch.h>

#include "hypershard/comm/local/local_world.h"
#include "hypershard/comm/world.h"
#include "hypershard/layout/mesh.h"
#include "hypershard/layout/topology.h"
#include "hypershard/nn/hooks.h"
#include "hypershard/optim/adamw.h"
#include "hypershard/shard/fully_shard.h"

using namespace hypershard;  // NOLINT(google-build-using-namespace): a program's own main

// 1. A model as libtorch users write it, but for two words: the base is nn::Hookable, and the
// author writes forward_impl. forward is inherited and calls the hooks around it.
struct BlockImpl : nn::Hookable<BlockImpl, torch::Tensor(torch::Tensor), torch::nn::Module> {
  BlockImpl()
      : a(register_module("a", torch::nn::Linear(16, 32))),
        b(register_module("b", torch::nn::Linear(32, 16))) {}
  torch::Tensor forward_impl(const torch::Tensor& x) { return x + b(torch::tanh(a(x))); }
  torch::nn::Linear a;
  torch::nn::Linear b;
};
TORCH_MODULE(Block);

struct NetImpl : nn::Hookable<NetImpl, torch::Tensor(torch::Tensor), torch::nn::Module> {
  NetImpl() {
    for (int i = 0; i < 3; ++i) {
      blocks->push_back(Block());
    }
    register_module("blocks", blocks);
    to(torch::kDouble);
  }
  torch::Tensor forward_impl(torch::Tensor x) {
    for (const auto& block : *blocks) {
      x = block->as<BlockImpl>()->forward(x);
    }
    return x;
  }
  using torch::nn::Module::to;
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(Net);

constexpr std::size_t kSteps = 10;
constexpr int kRows = 24;  // a step; divisible by 1, 2, 3 and 4 ranks

torch::Tensor batch_of(std::size_t step) {
  return torch::arange(kRows * 16, torch::kDouble)
      .mul(0.37)
      .add(static_cast<double>(step))
      .sin()
      .view({kRows, 16});
}

torch::Tensor loss_of(Net& net, const torch::Tensor& x) {
  return torch::mse_loss(net->forward(x), x.roll(1, /*dims=*/1));
}

// 2. What every rank runs. Between processes only the world is made differently: World::join().
std::vector<double> train(std::shared_ptr<comm::World> world, Net net) {
  const int rank = world->rank();
  const int ranks = world->size();
  const comm::ProcessMesh mesh(world, layout::DeviceMesh({{"shard", ranks}}, world->topology()));
  const shard::ShardedModel model = shard::fully_shard(*net, mesh, {.units = {"blocks.*"}});
  optim::AdamW optimizer(model, {.lr = 1e-2, .weight_decay = 0});
  std::vector<double> losses;
  for (std::size_t step = 0; step < kSteps; ++step) {
    // Each rank takes its rows; gradients are averaged over ranks, so equal parts give the mean.
    const torch::Tensor rows = batch_of(step).chunk(ranks)[static_cast<std::size_t>(rank)];
    torch::Tensor loss = loss_of(net, rows);
    model.zero_grad();
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

int main(int argc, char** argv) {
  const int ranks = argc == 3 && std::string(argv[1]) == "--ranks" ? std::atoi(argv[2]) : 2;
  if (ranks < 1 || kRows % ranks != 0) {
    std::fprintf(stderr, "--ranks %d: expected a divisor of %d\n", ranks, kRows);
    return 2;
  }

  // 3. One start for all: copies of one model (fully_shard would name a parameter that differs).
  torch::manual_seed(1);
  Net reference;
  std::vector<Net> nets(static_cast<std::size_t>(ranks));
  for (Net& net : nets) {
    const torch::NoGradGuard no_grad;
    const auto source = reference->parameters();
    for (std::size_t i = 0; i < source.size(); ++i) {
      net->parameters()[i].copy_(source[i]);
    }
  }

  // 4. Ranks are threads here, so that the example is one program.
  const comm::LocalJob job(layout::Topology::single_supernode(ranks));
  std::vector<std::vector<double>> losses(nets.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < nets.size(); ++rank) {
    threads.emplace_back([&, rank] {
      losses[rank] = train(job.world(static_cast<int>(rank)), nets[rank]);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }

  // 5. The same steps without sharding. The ranks' mean loss must be this one's.
  torch::optim::AdamW plain(
      reference->parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(0)
  );
  double worst = 0;
  for (std::size_t step = 0; step < kSteps; ++step) {
    torch::Tensor loss = loss_of(reference, batch_of(step));
    plain.zero_grad();
    loss.backward();
    plain.step();
    double mean = 0;
    for (const auto& of_rank : losses) {
      mean += of_rank[step] / ranks;
    }
    worst = std::max(worst, std::abs(mean - loss.item<double>()));
    std::printf(
        "step %zu  loss %.12f on %d ranks  %.12f on one\n", step, mean, ranks, loss.item<double>()
    );
  }
  const bool ok = worst < 1e-10;
  std::printf("largest difference from one process: %.1e (%s)\n", worst, ok ? "ok" : "too large");
  return ok ? 0 : 1;
}
