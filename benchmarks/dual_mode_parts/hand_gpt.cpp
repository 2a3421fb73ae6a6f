// See hand_gpt.h. Both collectives work in the memory of a tensor that nobody else uses, the best
// that can be done by hand.
#include "hand_gpt.h"

#include <utility>

#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/custom_function.h>

#include "hypershard/nn/attention.h"
#include "hypershard/nn/cross_entropy.h"
#include "hypershard/nn/embedding.h"
#include "hypershard/nn/linear.h"
#include "hypershard/nn/rms_norm.h"
#include "hypershard/nn/swiglu.h"

namespace hypershard::bench {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Ranks : torch::CustomClassHolder {
  explicit Ranks(std::shared_ptr<comm::Communicator> in) : communicator(std::move(in)) {}
  std::shared_ptr<comm::Communicator> communicator;
};

/// Identity; the gradient is summed.
struct CopyToRanks : torch::autograd::Function<CopyToRanks> {
  static at::Tensor forward(
      AutogradContext* ctx, const at::Tensor& x, const std::shared_ptr<comm::Communicator>& ranks
  ) {
    ctx->saved_data["ranks"] = c10::IValue::make_capsule(c10::make_intrusive<Ranks>(ranks));
    return x;
  }
  static variable_list backward(AutogradContext* ctx, variable_list& grads) {
    const auto holder =
        c10::static_intrusive_pointer_cast<Ranks>(ctx->saved_data.at("ranks").toCapsule());
    holder->communicator->all_reduce(grads[0], {}, "input")->wait();
    return {grads[0], at::Tensor()};
  }
};

/// The sum; the gradient is handed on.
struct SumOverRanks : torch::autograd::Function<SumOverRanks> {
  static at::Tensor forward(
      AutogradContext* /*ctx*/,
      const at::Tensor& x,
      const std::shared_ptr<comm::Communicator>& ranks
  ) {
    const at::Tensor sum = x.variable_data();
    ranks->all_reduce(sum, {}, "output")->wait();
    return sum;
  }
  static variable_list backward(AutogradContext* /*ctx*/, const variable_list& grads) {
    return {grads[0], at::Tensor()};
  }
};

at::Tensor heads_of(const at::Tensor& x, std::int64_t head_dim) {
  return x.view({x.size(0), x.size(1), x.size(2) / head_dim, head_dim});
}

}  // namespace

HandGpt::HandGpt(const model::GptImpl& whole, std::shared_ptr<comm::Communicator> ranks)
    : config_(whole.config()), ranks_(std::move(ranks)) {
  embed_ = part(whole.embed->weight, Cut::kNone);
  for (std::size_t i = 0; i < whole.blocks->size(); ++i) {
    const auto& from = whole.blocks->at<model::BlockImpl>(i);
    blocks_.push_back(
        {.attn_norm = part(from.attn_norm->weight, Cut::kNone),
         .wq = part(from.attn->wq->weight, Cut::kRows),
         .wk = part(from.attn->wk->weight, Cut::kRows),
         .wv = part(from.attn->wv->weight, Cut::kRows),
         .wo = part(from.attn->wo->weight, Cut::kColumns),
         .mlp_norm = part(from.mlp_norm->weight, Cut::kNone),
         .w1 = part(from.mlp->w1->weight, Cut::kRows),
         .w3 = part(from.mlp->w3->weight, Cut::kRows),
         .w2 = part(from.mlp->w2->weight, Cut::kColumns)}
    );
  }
  norm_ = part(whole.norm->weight, Cut::kNone);
  head_ = part(whole.head->weight, Cut::kNone);
  rotary_ = nn::make_rotary_table(
      config_.max_sequence, config_.head_dim(), config_.rope_theta, at::kFloat, at::kCPU
  );
}

at::Tensor HandGpt::part(const at::Tensor& whole, Cut cut) {
  at::Tensor mine = whole.detach();
  if (cut != Cut::kNone) {
    const int dim = cut == Cut::kRows ? 0 : 1;
    const std::int64_t count = mine.size(dim) / ranks_->size();
    mine = mine.narrow(dim, ranks_->rank() * count, count);
  }
  parameters_.push_back(mine.clone(at::MemoryFormat::Contiguous).requires_grad_());
  return parameters_.back();
}

at::Tensor HandGpt::attention(
    const Block& block, const at::Tensor& input, const nn::RotaryTable& rotary
) {
  const auto x = CopyToRanks::apply(input, ranks_);
  const std::int64_t head_dim = config_.head_dim();
  const auto q = nn::rotate(heads_of(nn::linear(x, block.wq), head_dim), rotary);
  const auto k = nn::rotate(heads_of(nn::linear(x, block.wk), head_dim), rotary);
  const auto v = heads_of(nn::linear(x, block.wv), head_dim);
  const auto heads = nn::causal_attention(q, k, v);
  const auto joined = heads.view({x.size(0), x.size(1), heads.size(2) * heads.size(3)});
  return SumOverRanks::apply(nn::linear(joined, block.wo), ranks_);
}

at::Tensor HandGpt::feed_forward(const Block& block, const at::Tensor& input) {
  const auto x = CopyToRanks::apply(input, ranks_);
  const auto hidden = nn::swiglu(nn::linear(x, block.w1), nn::linear(x, block.w3));
  return SumOverRanks::apply(nn::linear(hidden, block.w2), ranks_);
}

at::Tensor HandGpt::loss(const at::Tensor& tokens, const at::Tensor& targets) {
  auto x = nn::embedding(embed_, tokens);
  const auto rotary = rotary_.narrow(0, tokens.size(1));
  for (const Block& block : blocks_) {
    const auto y = x + attention(block, nn::rms_norm(x, block.attn_norm, config_.norm_eps), rotary);
    x = y + feed_forward(block, nn::rms_norm(y, block.mlp_norm, config_.norm_eps));
  }
  x = nn::rms_norm(x, norm_, config_.norm_eps);
  return nn::cross_entropy(nn::linear(x, head_), targets);
}

}  // namespace hypershard::bench
