// A transformer in small with switches for mistakes, and what is needed to run it right and wrong.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>

#include "hypershard/nn/recompute.h"
#include "hypershard/plan/gradient_equivalence.h"
#include "hypershard/plan/test_ranks.h"
#include "hypershard/plan/validation.h"

namespace hypershard::plan::test {

/// What the modules of a Lab share: which mistake is on, and what a mistake may need.
struct LabSwitches {
  std::string mistake;
  int rank = 0;
  std::shared_ptr<const comm::ProcessMesh> mesh;
  at::Generator dropout = at::make_generator<at::CPUGeneratorImpl>(7);
  bool with_dropout = false;
  bool recompute = false;
  at::Tensor last_mask;

  bool is(const char* name) const { return mistake == name; }
};
using Switches = std::shared_ptr<LabSwitches>;

constexpr std::int64_t kVocab = 16;
constexpr std::int64_t kDim = 8;
constexpr std::int64_t kHeads = 4;
constexpr std::int64_t kHidden = 12;
constexpr std::int64_t kBatch = 2;
constexpr std::int64_t kPositions = 2;

struct EmbedImpl : nn::Hookable<EmbedImpl, at::Tensor(const at::Tensor&), torch::nn::Module> {
  explicit EmbedImpl(Switches shared) : switches(std::move(shared)) {
    weight = register_parameter("weight", at::zeros({kVocab, kDim}, model_options()));
    positions = register_parameter("positions", at::zeros({kPositions, kDim}, model_options()));
  }
  at::Tensor forward_impl(const at::Tensor& tokens) {
    // Never reads beyond the table, so that a table that is cut is read at the wrong rows.
    return at::embedding(weight, tokens.remainder(weight.size(0))) + positions;
  }
  Switches switches;
  at::Tensor weight;
  at::Tensor positions;
};
TORCH_MODULE(Embed);

struct AttentionImpl
    : nn::Hookable<AttentionImpl, at::Tensor(const at::Tensor&), torch::nn::Module> {
  explicit AttentionImpl(Switches shared)
      : switches(std::move(shared)),
        q(kDim, kDim, false),
        k(kDim, kDim, false),
        v(kDim, kDim, false),
        proj(kDim, kDim, false) {
    register_module("q", q);
    register_module("k", k);
    register_module("v", v);
    register_module("proj", proj);
  }
  at::Tensor heads(const at::Tensor& x) const {
    const auto sizes = switches->is("global_heads")
                           ? std::vector<std::int64_t>{x.size(0), x.size(1), kHeads, -1}
                           : std::vector<std::int64_t>{x.size(0), x.size(1), -1, kDim / kHeads};
    return x.view(sizes).transpose(1, 2);
  }
  at::Tensor forward_impl(const at::Tensor& x) {
    const auto scores = at::matmul(heads(q->forward(x)), heads(k->forward(x)).transpose(-1, -2));
    const auto weights =
        switches->is("softmax_over_heads") ? at::softmax(scores, 1) : at::softmax(scores * 0.7, -1);
    const auto mixed = at::matmul(weights, heads(v->forward(x)));
    return proj->forward(mixed.transpose(1, 2).reshape({x.size(0), x.size(1), -1}));
  }
  Switches switches;
  Dense q, k, v, proj;
};
TORCH_MODULE(Attention);

struct FeedForwardImpl
    : nn::Hookable<FeedForwardImpl, at::Tensor(const at::Tensor&), torch::nn::Module> {
  explicit FeedForwardImpl(Switches shared)
      : switches(std::move(shared)), up(kDim, kHidden), down(kHidden, kDim, false) {
    register_module("up", up);
    register_module("down", down);
    bias = register_parameter("bias", at::zeros({kDim}, model_options()));
  }
  at::Tensor forward_impl(const at::Tensor& x) {
    at::Tensor h = at::gelu(up->forward(x));
    if (switches->is("norm_over_cut_dim")) {
      h = h * at::rsqrt(h.pow(2).mean(-1, true) + 1e-5);
    } else if (switches->is("max_over_cut_dim")) {
      h = h / (1.0 + h.abs().amax(-1, true));
    } else if (switches->is("centred_over_cut_dim")) {
      h = h - h.mean(-1, true);
    }
    // Takes what fits, so that a hidden layer that is whole is read at the wrong columns.
    const std::int64_t width = down->weight.size(1);
    at::Tensor y = down->forward(h.size(-1) == width ? h : h.narrow(-1, 0, width));
    if (switches->is("bias_before_reduction")) {
      y = y + bias;
    } else if (switches->is("residual_before_reduction")) {
      y = y + x;
    } else if (switches->is("gelu_before_reduction")) {
      y = at::gelu(y);
    } else if (switches->is("square_before_reduction")) {
      y = y * y;
    } else if (switches->is("own_reduction")) {
      y = y.clone();
      switches->mesh->axis("tp")->all_reduce(y.detach(), comm::ReduceOp::kSum, "my own")->wait();
    } else if (switches->is("constant_before_reduction")) {
      y = y + 0.5;
    }
    return y;
  }
  Switches switches;
  Dense up, down;
  at::Tensor bias;
};
TORCH_MODULE(FeedForward);

struct LayerImpl : nn::Hookable<LayerImpl, at::Tensor(const at::Tensor&), torch::nn::Module> {
  explicit LayerImpl(Switches shared)
      : switches(shared), norm1(kDim), attn(shared), norm2(kDim), mlp(shared) {
    register_module("norm1", norm1);
    register_module("attn", attn);
    register_module("norm2", norm2);
    register_module("mlp", mlp);
  }
  at::Tensor forward_impl(const at::Tensor& input) {
    at::Tensor x = input;
    if (switches->is("local_positions")) {
      x = x + at::arange(x.size(1), x.options()).view({1, -1, 1}) * 0.1;
    } else if (switches->is("prefix_per_rank")) {
      x = at::cat({x.narrow(1, 0, 1) * 0 + 0.3, x}, 1).narrow(1, 0, x.size(1));
    } else if (switches->is("rank_scale")) {
      x = x * (1.0 + 0.5 * switches->rank);
    } else if (switches->is("rank_branch") && switches->rank == 1) {
      x = x + 0.25;
    } else if (switches->is("rank_dtype") && switches->rank == 1) {
      x = x.to(at::kFloat).to(at::kDouble);
    } else if (switches->is("rank_rows")) {
      x = x.roll({switches->rank}, {1});
    }
    at::Tensor h = x + attn->forward(norm1->forward(x));
    h = h + dropped(mlp->forward(norm2->forward(h)));
    return switches->is("positions_over_cut_dim") ? h - h.mean(1, true) : h;
  }
  at::Tensor dropped(const at::Tensor& h) const {
    if (!switches->with_dropout) {
      return h;
    }
    switches->last_mask = at::bernoulli(at::full_like(h, 0.5), switches->dropout);
    return h * switches->last_mask * 2.0;
  }
  Switches switches;
  Norm norm1;
  Attention attn;
  Norm norm2;
  FeedForward mlp;
};
TORCH_MODULE(Layer);

/// A projection by another module's weight.
struct HeadImpl : nn::Hookable<HeadImpl, at::Tensor(const at::Tensor&), torch::nn::Module> {
  explicit HeadImpl(const at::Tensor& tied) { weight = register_parameter("weight", tied); }
  at::Tensor forward_impl(const at::Tensor& x) { return at::linear(x, weight); }
  at::Tensor weight;
};
TORCH_MODULE(Head);

/// Embedding, one layer, norm, and a head that is tied to the embedding; returns the loss.
struct LabImpl : nn::Hookable<LabImpl, at::Tensor(const at::Tensor&), torch::nn::Module> {
  explicit LabImpl(Switches shared)
      : switches(shared), embed(shared), layer(shared), norm(kDim), head(embed->weight) {
    register_module("embed", embed);
    register_module("layer", layer);
    register_module("norm", norm);
    register_module("head", head);
    fill_by_formula(*this);
  }
  at::Tensor forward_impl(const at::Tensor& tokens) {
    const at::Tensor x = embed->forward(tokens);
    const at::Tensor h = norm->forward(
        switches->recompute
            ? nn::recompute([this](const at::Tensor& input) { return layer->forward(input); }, x)
            : layer->forward(x)
    );
    return head->forward(h).pow(2).mean();
  }
  Switches switches;
  Embed embed;
  Layer layer;
  Norm norm;
  Head head;
};
TORCH_MODULE(Lab);

inline at::Tensor lab_tokens() {
  return at::arange(kBatch * kPositions, at::kLong)
      .mul(5)
      .remainder(kVocab)
      .view({kBatch, kPositions});
}

/// Columns and rows cut over tp, activations whole between them.
inline ShardingPlan lab_tensor_parallel() {
  ShardingPlan plan;
  plan.parameter("layer.attn.{q,k,v}.weight", {{"tp", Placement::shard(0)}})
      .parameter("layer.attn.proj.weight", {{"tp", Placement::shard(1)}})
      .parameter("layer.mlp.up.*", {{"tp", Placement::shard(0)}})
      .parameter("layer.mlp.down.weight", {{"tp", Placement::shard(1)}})
      .input("layer.{attn,mlp}", {{"tp", Placement::replicate()}})
      .output("layer.{attn,mlp}", {{"tp", Placement::replicate()}});
  return plan;
}

/// The same with positions cut over tp between them.
inline ShardingPlan lab_sequence_parallel() {
  ShardingPlan plan;
  plan.parameter("layer.attn.{q,k,v}.weight", {{"tp", Placement::shard(0)}})
      .parameter("layer.attn.proj.weight", {{"tp", Placement::shard(1)}})
      .parameter("layer.mlp.up.*", {{"tp", Placement::shard(0)}})
      .parameter("layer.mlp.down.weight", {{"tp", Placement::shard(1)}})
      .input("layer", {{"tp", Placement::shard(1)}})
      .input("layer.{attn,mlp}", {{"tp", Placement::replicate()}})
      .output("layer.{attn,mlp}", {{"tp", Placement::shard(1)}})
      .output("layer", {{"tp", Placement::replicate()}});
  return plan;
}

}  // namespace hypershard::plan::test
