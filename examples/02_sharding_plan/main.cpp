// Spreads a model by a plan of its own over the axis `tp`, shards it over the rest, validates and
// trains it. One operator is the model's own, and has a layout rule.
// Run:       ./example_02_sharding_plan --ranks 4
// Last line: largest difference from one process: <a small number> (ok)
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include <torch/library.h>
#include <torch/torch.h>

#include "hypershard/comm/local/local_world.h"
#include "hypershard/comm/world.h"
#include "hypershard/dtensor/op_rules.h"
#include "hypershard/dtensor/rule_call.h"
#include "hypershard/layout/mesh.h"
#include "hypershard/layout/sharding.h"
#include "hypershard/layout/topology.h"
#include "hypershard/nn/hooks.h"
#include "hypershard/optim/adamw.h"
#include "hypershard/plan/apply.h"
#include "hypershard/plan/parameter_specs.h"
#include "hypershard/plan/validation.h"
#include "hypershard/shard/fully_shard.h"

using namespace hypershard;  // NOLINT(google-build-using-namespace): a program's own main
using layout::Placement;

// 1. An operator of our own. Its rule says that every dimension of the result is that dimension of
// the operand, so that any cut passes through; it is in no term, so that a Partial operand, on
// which it would be wrong, is refused.
torch::Tensor squash(const torch::Tensor& x, double slope) {
  return x * torch::sigmoid(x * slope);
}
TORCH_LIBRARY(example, library) {
  library.def("squash", squash);
}
dtensor::DimMap squash_rule(const dtensor::RuleCall& call) {
  dtensor::DimMap map;
  dtensor::Dims dims;
  for (int dim = 0; dim < call.rank(0); ++dim) {
    dims.push_back(dtensor::Dim::of(map.new_label()));
  }
  map.operands = {{dims}};
  map.outputs = {{dims}};
  return map;
}
torch::Tensor call_squash(const torch::Tensor& x, double slope) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("example::squash", "")
                             .typed<torch::Tensor(const torch::Tensor&, double)>();
  return op.call(x, slope);
}

// 2. Modules at whose doors tensors may have to move are hookable; those inside need not be.
struct MlpImpl : nn::Hookable<MlpImpl, torch::Tensor(torch::Tensor), torch::nn::Module> {
  MlpImpl()
      : up(register_module("up", torch::nn::Linear(16, 32))),
        down(
            register_module("down", torch::nn::Linear(torch::nn::LinearOptions(32, 16).bias(false)))
        ) {}
  torch::Tensor forward_impl(const torch::Tensor& x) { return down(call_squash(up(x), 1.5)); }
  torch::nn::Linear up;
  torch::nn::Linear down;
};
TORCH_MODULE(Mlp);

struct BlockImpl : nn::Hookable<BlockImpl, torch::Tensor(torch::Tensor), torch::nn::Module> {
  BlockImpl()
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})))),
        mlp(register_module("mlp", Mlp())) {}
  torch::Tensor forward_impl(const torch::Tensor& x) { return x + mlp(norm(x)); }
  torch::nn::LayerNorm norm;
  Mlp mlp;
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

// 3. The plan: hidden units are cut, what enters an mlp is whole, and what leaves it is summed.
plan::ShardingPlan make_plan() {
  plan::ShardingPlan plan;
  plan.parameter("blocks.*.mlp.up.*", {{"tp", Placement::shard(0)}})
      .parameter("blocks.*.mlp.down.weight", {{"tp", Placement::shard(1)}})
      .input("blocks.*.mlp", {{"tp", Placement::replicate()}})
      .output("blocks.*.mlp", {{"tp", Placement::replicate()}});
  return plan;
}

constexpr std::size_t kSteps = 6;
constexpr int kRows = 24;  // a step; divisible by 1, 2, 3 and 4 data ranks

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

// 4. What every rank runs.
std::vector<double> train(std::shared_ptr<comm::World> world, Net net) {
  const layout::DeviceMesh axes({{"shard", world->size() / 2}, {"tp", 2}}, world->topology());
  const auto mesh = std::make_shared<const comm::ProcessMesh>(world, axes);
  // Rows are dealt to the data ranks; ranks along tp have the same ones.
  const layout::TensorSpec spec{{kRows, 16}, {{Placement::shard(0), Placement::replicate()}}};
  const auto rows_of = [&](std::size_t step) {
    const std::int64_t begin = layout::local_offset(spec, axes, world->rank())[0];
    return batch_of(step).narrow(0, begin, layout::local_shape(spec, axes, world->rank())[0]);
  };
  // Runs the model once to find what arrives at each boundary, then cuts the parameters.
  const torch::Tensor rows = rows_of(0);
  const plan::AppliedPlan applied = plan::apply_plan(
      *net,
      make_plan(),
      mesh,
      {{rows, spec, "rows"}},
      [&] { return std::vector<torch::Tensor>{loss_of(net, rows)}; },
      {.data_axes = {"shard"}},
      {.reduce_gradients = false}  // fully_shard does it
  );
  if (world->rank() == 0) {
    std::printf("%s\n", plan::to_text(applied.resolved(), axes).c_str());
  }
  shard::FullyShardOptions options{.units = {"blocks.*"}};
  options.parameters = plan::parameter_specs(applied.resolved());
  const shard::ShardedModel model = shard::fully_shard(*net, *mesh, options);
  optim::AdamW optimizer(model, {.lr = 1e-2, .weight_decay = 0});

  std::vector<double> losses;
  for (std::size_t step = 0; step < kSteps; ++step) {
    model.zero_grad();
    torch::Tensor loss;
    if (step == 0) {  // Every operator is asked of its rule, and ranks are compared.
      plan::ValidationGuard guard(*net, applied, {.has_engine = true});
      const torch::Tensor checked = rows_of(step);
      guard.set_layout(checked, spec.layout, "rows");  // the loss reads them too
      loss = loss_of(net, checked);
      loss.backward();
      guard.finish();
      if (world->rank() == 0) {
        const plan::ValidationCounts counts = guard.counts();
        std::printf(
            "validated %lld operators, %lld boundaries\n",
            static_cast<long long>(counts.operators + counts.backward_operators),
            static_cast<long long>(counts.boundaries)
        );
      }
    } else {
      loss = loss_of(net, rows_of(step));
      loss.backward();
    }
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  world->shutdown();
  return losses;
}

int main(int argc, char** argv) try {
  const int ranks = argc == 3 && std::string(argv[1]) == "--ranks" ? std::atoi(argv[2]) : 2;
  if (ranks < 2 || ranks % 2 != 0 || kRows % (ranks / 2) != 0) {
    std::fprintf(stderr, "--ranks %d: expected twice a divisor of %d\n", ranks, kRows);
    return 2;
  }
  dtensor::register_op_rule("example::squash", squash_rule);

  // 5. One start for all.
  std::vector<Net> nets(static_cast<std::size_t>(ranks));
  for (Net& net : nets) {
    torch::manual_seed(1);
    net = Net();
  }
  torch::manual_seed(1);
  Net reference;

  const comm::LocalJob job(layout::Topology::single_supernode(ranks));
  std::vector<std::vector<double>> losses(nets.size());
  std::vector<std::string> errors(nets.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < nets.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        losses[rank] = train(job.world(static_cast<int>(rank)), nets[rank]);
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const std::string& error : errors) {
    if (!error.empty()) {
      std::fprintf(stderr, "%s\n", error.c_str());
      return 1;
    }
  }

  // 6. The same steps without plan and sharding. The mean over the data ranks must be this loss.
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
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
