// The tensor-parallel GPT as somebody would write it who has no plans: plain tensors, the layers'
// functions, and two collectives a layer put in by hand.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/comm/communicator.h"
#include "hypershard/model/gpt.h"

namespace hypershard::bench {

/// A copy of a GPT of which each rank holds its heads and hidden units.
class HandGpt {
 public:
  /// Cuts the weights of `whole`. Heads and hidden units divide by the ranks.
  HandGpt(const model::GptImpl& whole, std::shared_ptr<comm::Communicator> ranks);

  /// Returns the mean cross entropy. Collective, in backward too.
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets);
  const std::vector<at::Tensor>& parameters() const { return parameters_; }

 private:
  struct Block {
    at::Tensor attn_norm, wq, wk, wv, wo, mlp_norm, w1, w3, w2;
  };
  enum class Cut : std::uint8_t { kNone, kRows, kColumns };

  at::Tensor part(const at::Tensor& whole, Cut cut);
  at::Tensor attention(const Block& block, const at::Tensor& x, const nn::RotaryTable& rotary);
  at::Tensor feed_forward(const Block& block, const at::Tensor& x);

  model::GptConfig config_;
  std::shared_ptr<comm::Communicator> ranks_;
  std::vector<at::Tensor> parameters_;
  std::vector<Block> blocks_;
  at::Tensor embed_, norm_, head_;
  nn::RotaryTable rotary_;
};

}  // namespace hypershard::bench
