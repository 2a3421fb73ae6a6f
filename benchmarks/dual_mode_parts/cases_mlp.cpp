// A tensor-parallel MLP block alone: what PyTorch's DTensor is compared with.
#include "cases.h"
#include <nlohmann/json.hpp>

#include <ATen/ops/gelu.h>
#include <ATen/ops/ones.h>
#include <torch/nn/pimpl.h>

#include "hypershard/comm/communicator.h"
#include "hypershard/layout/sharding.h"
#include "hypershard/nn/hooks.h"
#include "hypershard/nn/init.h"
#include "hypershard/nn/linear.h"
#include "hypershard/plan/apply.h"

namespace hypershard::bench {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t kTokens = 64;

/// down(gelu(up(x))).
struct MlpImpl : nn::Hookable<MlpImpl, at::Tensor(const at::Tensor&), torch::nn::Module> {
  explicit MlpImpl(std::int64_t dim)
      : up(nn::LinearOptions{.in = dim, .out = 4 * dim, .bias = false}),
        down(nn::LinearOptions{.in = 4 * dim, .out = dim, .bias = false}) {
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward_impl(const at::Tensor& x) { return down->forward(at::gelu(up->forward(x))); }
  nn::Linear up, down;
};
TORCH_MODULE(Mlp);

struct NetImpl : nn::Hookable<NetImpl, at::Tensor(const at::Tensor&), torch::nn::Module> {
  explicit NetImpl(std::int64_t dim) : mlp(register_module("mlp", Mlp(dim))) {}
  at::Tensor forward_impl(const at::Tensor& x) { return mlp->forward(x); }
  Mlp mlp;
};
TORCH_MODULE(Net);

plan::ShardingPlan mlp_plan() {
  using layout::Placement;
  plan::ShardingPlan plan;
  plan.parameter("mlp.up.weight", {{"tp", Placement::shard(0)}})
      .parameter("mlp.down.weight", {{"tp", Placement::shard(1)}})
      .input("mlp", {{"tp", Placement::replicate()}})
      .output("mlp", {{"tp", Placement::replicate()}});
  return plan;
}

at::Tensor formula(at::IntArrayRef sizes, double step) {
  return at::ones(sizes, at::kFloat).cumsum(-1).mul(step).cos().mul(0.1);
}

}  // namespace

std::string measure_mlp(const std::shared_ptr<comm::World>& world, std::int64_t dim, int repeats) {
  const auto mesh = std::make_shared<const comm::ProcessMesh>(
      world, layout::DeviceMesh({{"tp", world->size()}}, world->topology())
  );
  Net whole(dim);
  Net net(dim);
  {
    const at::NoGradGuard no_grad;
    for (const auto& each : {whole, net}) {
      each->mlp->up->weight.copy_(formula({4 * dim, dim}, 0.7));
      each->mlp->down->weight.copy_(formula({dim, 4 * dim}, 0.3));
    }
  }
  const at::Tensor x = formula({kTokens, dim}, 0.9).requires_grad_();
  const at::Tensor grad = at::ones({kTokens, dim});
  const auto applied = plan::apply_plan(
      *net,
      mlp_plan(),
      mesh,
      {{x, {x.sizes().vec(), layout::replicated_layout(mesh->mesh())}, "x"}},
      [&] { return std::vector<at::Tensor>{net->forward(x)}; }
  );
  const auto step = [&](Net& model) {
    for (auto& parameter : model->parameters()) {
      parameter.mutable_grad() = at::Tensor();
    }
    x.mutable_grad() = at::Tensor();
    const auto y = model->forward(x);
    y.backward(grad);
    return y;
  };
  const auto expected = step(whole).detach();
  const auto expected_gradient = x.grad();
  const auto found = step(net).detach();
  const double gap = std::max(
      (found - expected).abs().max().item<double>(),
      (x.grad() - expected_gradient).abs().max().item<double>()
  );
  const int inner = static_cast<int>(std::max<std::int64_t>(20, 25600 / dim));
  std::vector<double> samples;
  for (int repeat = -1; repeat < repeats; ++repeat) {
    world->world_communicator()->barrier("bench")->wait();
    const double seconds = seconds_of([&] {
      for (int i = 0; i < inner; ++i) {
        step(net);
      }
    });
    if (repeat >= 0) {
      samples.push_back(seconds / inner);
    }
  }
  return Json{
      {"dim", dim}, {"tokens", kTokens}, {"us", summary(samples, 1e6)}, {"max_abs_difference", gap}
  }.dump();
}

}  // namespace hypershard::bench
