// Small hookable models for the tests of plans: plain operators in modules, filled by formula, so
// that every rank has the same values.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/pimpl.h>

#include "hypershard/layout/mesh.h"
#include "hypershard/nn/hooks.h"
#include "hypershard/plan/sharding_plan.h"

namespace hypershard::plan::test {

using layout::Placement;

/// Text of what `action` throws, empty if nothing.
inline std::string thrown_by(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

#define HS_EXPECT_HAS(text, fragment) \
  EXPECT_NE(std::string(text).find(fragment), std::string::npos) << "text: " << (text)

/// A mesh over ranks that need not exist, all in one supernode.
inline layout::DeviceMesh planned_mesh(std::vector<layout::MeshAxis> axes) {
  int size = 1;
  for (const auto& axis : axes) {
    size *= axis.size;
  }
  return layout::DeviceMesh(std::move(axes), layout::Topology::single_supernode(size));
}

/// Device and dtype of the models that this thread makes.
inline at::TensorOptions& model_options() {
  static thread_local at::TensorOptions options = at::TensorOptions().dtype(at::kDouble);
  return options;
}

inline void fill_by_formula(torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  double phase = 0.1;
  for (auto& item : module.named_parameters()) {
    if (item.value().is_meta()) {
      continue;
    }
    const auto values = at::arange(item.value().numel(), at::kDouble).mul(0.7).add(phase).sin();
    item.value().copy_(values.mul(0.3).view(item.value().sizes()));
    phase += 1.3;
  }
}

/// x weight^T + bias by at::linear.
struct DenseImpl : nn::Hookable<DenseImpl, at::Tensor(const at::Tensor&), torch::nn::Module> {
  DenseImpl(std::int64_t in, std::int64_t out, bool with_bias = true) {
    weight = register_parameter("weight", at::zeros({out, in}, model_options()));
    if (with_bias) {
      bias = register_parameter("bias", at::zeros({out}, model_options()));
    }
  }
  at::Tensor forward_impl(const at::Tensor& x) {
    return bias.defined() ? at::linear(x, weight, bias) : at::linear(x, weight);
  }
  at::Tensor weight;
  at::Tensor bias;
};
TORCH_MODULE(Dense);

/// Scales to unit length over the last dimension, then by a weight.
struct NormImpl : nn::Hookable<NormImpl, at::Tensor(const at::Tensor&), torch::nn::Module> {
  explicit NormImpl(std::int64_t dim) {
    weight = register_parameter("weight", at::ones({dim}, model_options()));
  }
  at::Tensor forward_impl(const at::Tensor& x) {
    return x * at::rsqrt(x.pow(2).mean(-1, true) + 1e-5) * weight;
  }
  at::Tensor weight;
};
TORCH_MODULE(Norm);

/// down(gelu(up(x))).
struct MlpImpl : nn::Hookable<MlpImpl, at::Tensor(const at::Tensor&), torch::nn::Module> {
  MlpImpl(std::int64_t dim, std::int64_t hidden)
      : up(dim, hidden), down(hidden, dim, /*with_bias=*/false) {
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward_impl(const at::Tensor& x) { return down->forward(at::gelu(up->forward(x))); }
  Dense up;
  Dense down;
};
TORCH_MODULE(Mlp);

/// x + mlp(norm(x)).
struct BlockImpl : nn::Hookable<BlockImpl, at::Tensor(const at::Tensor&), torch::nn::Module> {
  BlockImpl(std::int64_t dim, std::int64_t hidden) : norm(dim), mlp(dim, hidden) {
    register_module("norm", norm);
    register_module("mlp", mlp);
  }
  at::Tensor forward_impl(const at::Tensor& x) { return x + mlp->forward(norm->forward(x)); }
  Norm norm;
  Mlp mlp;
};
TORCH_MODULE(Block);

/// Blocks, then a projection `head`.
struct NetImpl : nn::Hookable<NetImpl, at::Tensor(const at::Tensor&), torch::nn::Module> {
  NetImpl(std::int64_t dim, std::int64_t hidden, int num_blocks = 2) : head(dim, 3) {
    for (int i = 0; i < num_blocks; ++i) {
      blocks->push_back(Block(dim, hidden));
    }
    register_module("blocks", blocks);
    register_module("head", head);
    fill_by_formula(*this);
  }
  at::Tensor forward_impl(const at::Tensor& x) {
    at::Tensor h = x;
    for (std::size_t i = 0; i < blocks->size(); ++i) {
      h = blocks[i]->as<BlockImpl>()->forward(h);
    }
    return head->forward(h);
  }
  torch::nn::ModuleList blocks;
  Dense head;
};
TORCH_MODULE(Net);

/// Column- then row-parallel MLPs with a reduction behind each.
inline ShardingPlan tensor_parallel_plan() {
  ShardingPlan plan;
  plan.parameter("blocks.*.mlp.up.*", {{"tp", Placement::shard(0)}})
      .parameter("blocks.*.mlp.down.weight", {{"tp", Placement::shard(1)}})
      .input("blocks.*.mlp", {{"tp", Placement::replicate()}})
      .output("blocks.*.mlp", {{"tp", Placement::replicate()}});
  return plan;
}

/// Blocks whose rows are cut over tp between the MLPs, as positions are under sequence
/// parallelism.
inline ShardingPlan sequence_parallel_plan() {
  ShardingPlan plan;
  plan.parameter("blocks.*.mlp.up.*", {{"tp", Placement::shard(0)}})
      .parameter("blocks.*.mlp.down.weight", {{"tp", Placement::shard(1)}})
      .input("blocks.0", {{"tp", Placement::shard(0)}})
      .input("blocks.*.mlp", {{"tp", Placement::replicate()}})
      .output("blocks.*.mlp", {{"tp", Placement::shard(0)}})
      .input("head", {{"tp", Placement::replicate()}});
  return plan;
}

}  // namespace hypershard::plan::test
