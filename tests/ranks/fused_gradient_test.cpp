// Gradients that layers write into the engine's buffers are those that autograd makes: for every
// way in which a parameter can meet its gradient more or less than once.
#include <functional>
#include <map>
#include <memory>
#include <string>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/pimpl.h>

#include "hypershard/model/gpt.h"
#include "hypershard/nn/cross_entropy.h"
#include "hypershard/shard/fully_shard.h"
#include "hypershard/testing/run_ranks.h"

namespace hypershard {
namespace {

using Gradients = std::map<std::string, at::Tensor>;

struct Case {
  const char* name;
  bool tied = false;
  bool recompute = false;
  const char* frozen = "";  ///< start of the names that get no gradient
  bool twice = false;       ///< one block, which runs twice
  bool bf16 = false;
  /// Relative to the largest element of a gradient; sums of micro-batches and ranks come in another
  /// order than autograd's.
  double bound = 2e-6;
};

const Case kCases[] = {
    {.name = "plain"},
    {.name = "tied", .tied = true},
    {.name = "recompute", .recompute = true},
    {.name = "tied_recompute", .tied = true, .recompute = true},
    {.name = "frozen_block", .frozen = "blocks.1."},
    {.name = "frozen_embedding", .frozen = "embed."},
    {.name = "twice", .twice = true},
    // Autograd rounds each gradient to 8 bits before it can be summed; ours are not rounded at all.
    {.name = "bf16", .bf16 = true, .bound = 0.004},
};

constexpr int kRanks = 2;
constexpr int kRows = 24;
constexpr std::int64_t kPositions = 12;
constexpr std::int64_t kVocabulary = 40;

model::GptConfig config_of(const Case& test) {
  return {
      .vocab_size = kVocabulary,
      .num_layers = 3,
      .dim = 32,
      .num_heads = 2,
      .num_kv_heads = 1,
      .max_sequence = kPositions,
      .tie_embeddings = test.tied,
      .recompute = test.recompute ? model::RecomputePolicy::kBlock : model::RecomputePolicy::kNone
  };
}

/// A decoder whose layers share one block.
struct LoopedImpl : nn::Hookable<
                        LoopedImpl,
                        at::Tensor(const at::Tensor&, const at::Tensor&),
                        torch::nn::Module> {
  explicit LoopedImpl(const model::GptConfig& config)
      : embed(register_module("embed", nn::Embedding(config.vocab_size, config.dim))),
        blocks(register_module("blocks", torch::nn::ModuleList())),
        norm(register_module("norm", nn::RmsNorm(config.dim))),
        head(register_module("head", nn::Linear(config.dim, config.vocab_size))),
        rotary(nn::make_rotary_table(
            config.max_sequence, config.head_dim(), config.rope_theta, at::kFloat, at::kCPU
        )) {
    blocks->push_back(model::Block(config, at::TensorOptions().dtype(at::kFloat).device(at::kCPU)));
    const at::NoGradGuard no_grad;
    for (auto& parameter : parameters()) {
      parameter.copy_(at::arange(parameter.numel())
                          .mul(0.7)
                          .sin()
                          .mul(0.2)
                          .add(parameter.dim() == 1 ? 1.0 : 0.0)
                          .view(parameter.sizes()));
    }
  }
  at::Tensor forward_impl(const at::Tensor& tokens, const at::Tensor& targets) {
    const model::BlockContext context{.rotary = rotary};
    at::Tensor x = embed->forward(tokens);
    for (int i = 0; i < 2; ++i) {
      x = blocks->at<model::BlockImpl>(0).forward(x, context);
    }
    return nn::cross_entropy(head->forward(norm->forward(x)), targets);
  }
  nn::Embedding embed;
  torch::nn::ModuleList blocks;
  nn::RmsNorm norm;
  nn::Linear head;
  nn::RotaryTable rotary;
};
TORCH_MODULE(Looped);

/// A model and the loss of a batch.
struct Subject {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const at::Tensor& tokens, const at::Tensor& targets)> forward;

  at::Tensor loss(const at::Tensor& batch) const {
    return forward(batch.narrow(1, 0, kPositions), batch.narrow(1, 1, kPositions));
  }
};

Subject build(const Case& test) {
  if (test.twice) {
    Looped model(config_of(test));
    return {model.ptr(), [model](const at::Tensor& tokens, const at::Tensor& targets) mutable {
              return model->forward(tokens, targets);
            }};
  }
  model::Gpt model(config_of(test));
  return {model.ptr(), [model](const at::Tensor& tokens, const at::Tensor& targets) mutable {
            return model->loss(tokens, targets);
          }};
}

Subject make_model(const Case& test) {
  Subject model = build(test);
  for (const auto& item : model.module->named_parameters()) {
    const std::string frozen = test.frozen;
    if (!frozen.empty() && item.key().starts_with(frozen)) {
      item.value().requires_grad_(false);
    }
  }
  return model;
}

at::Tensor rows(int first, int count) {
  return at::arange(kRows * (kPositions + 1), at::kLong)
      .mul(11)
      .add(3)
      .remainder(kVocabulary)
      .view({kRows, kPositions + 1})
      .narrow(0, first, count);
}

/// The rows of one rank's micro-batch.
at::Tensor rows_of(int rank, int micro, int accumulation) {
  const int count = kRows / kRanks / accumulation;
  return rows((micro * kRanks + rank) * count, count);
}

/// Autograd's own, of the mean over all rows.
Gradients plain_gradients(const Case& test) {
  const Subject model = make_model(test);
  model.loss(rows(0, kRows)).backward();
  Gradients gradients;
  for (const auto& item : model.module->named_parameters()) {
    if (item.value().grad().defined()) {
      gradients[item.key()] = item.value().grad();
    }
  }
  return gradients;
}

/// Those of the model in bf16, one micro-batch of one rank after another, summed in fp32.
Gradients bf16_gradients(const Case& test, int accumulation) {
  const Subject model = make_model(test);
  model.module->to(at::kBFloat16);
  Gradients gradients;
  for (int part = 0; part < accumulation * kRanks; ++part) {
    model.module->zero_grad();
    (model.loss(rows_of(part % kRanks, part / kRanks, accumulation)) / accumulation).backward();
    for (const auto& item : model.module->named_parameters()) {
      const at::Tensor gradient = item.value().grad().to(at::kFloat) / kRanks;
      at::Tensor& sum = gradients[item.key()];
      sum = sum.defined() ? sum + gradient : gradient;
    }
  }
  return gradients;
}

Gradients expected_gradients(const Case& test, int accumulation) {
  return test.bf16 ? bf16_gradients(test, accumulation) : plain_gradients(test);
}

class FusedGradientTest : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(All, FusedGradientTest, ::testing::ValuesIn(kCases), [](const auto& each) {
  return std::string(each.param.name);
});

/// Every parameter has the gradient that is expected of it, or none.
void expect_gradients(
    const shard::ShardedModel& sharded,
    const Gradients& expected,
    const Case& test,
    const std::string& how
) {
  for (const std::string& name : sharded.parameter_names()) {
    const at::Tensor found = sharded.full_gradient(name);
    const auto wanted = expected.find(name);
    ASSERT_EQ(found.defined(), wanted != expected.end()) << name << how;
    if (!found.defined()) {
      continue;
    }
    EXPECT_EQ(found.scalar_type(), at::kFloat) << name;
    const double scale = wanted->second.abs().max().item<double>();
    EXPECT_LE((found - wanted->second).abs().max().item<double>(), test.bound * scale)
        << name << how;
  }
}

TEST_P(FusedGradientTest, EqualsAutogradsForEveryAccumulation) {
  const Case& test = GetParam();
  std::map<int, Gradients> expected;
  for (const int accumulation : {1, 2, 3, 4}) {
    expected[accumulation] = expected_gradients(test, accumulation);
  }
  testing::run_ranks(kRanks, [&](const std::shared_ptr<comm::World>& world) {
    for (const auto& [accumulation, gradients] : expected) {
      const Subject model = make_model(test);
      shard::FullyShardOptions options;
      options.units = {"blocks.*"};
      if (test.bf16) {
        options.precision.compute = at::kBFloat16;
        options.precision.reduce = at::kFloat;
      }
      const comm::ProcessMesh mesh(
          world, layout::DeviceMesh({{"shard", kRanks}}, world->topology())
      );
      const shard::ShardedModel sharded = shard::fully_shard(*model.module, mesh, options);
      for (int micro = 0; micro < accumulation; ++micro) {
        sharded.set_requires_gradient_sync(micro + 1 == accumulation);
        (model.loss(rows_of(world->rank(), micro, accumulation)) / accumulation).backward();
      }
      EXPECT_EQ(sharded.counters().copied_bytes, 0);
      expect_gradients(sharded, gradients, test, " accumulation " + std::to_string(accumulation));
    }
  });
}

// A gradient that is written first and added to later: in fp32 either way, but not in autograd's
// order.
bool has_several_terms(const Case& test, const std::string& name) {
  return (test.tied && name == "embed.weight") || (test.twice && name.starts_with("blocks."));
}

// On one rank nothing is summed in another order: the same GEMMs give the same bits.
TEST(FusedGradientBitsTest, OneRankGivesAutogradsBits) {
  for (const Case& test : kCases) {
    if (test.bf16) {
      continue;  // autograd has no bf16 model with fp32 gradients
    }
    const Gradients expected = plain_gradients(test);
    testing::run_ranks(1, [&](const std::shared_ptr<comm::World>& world) {
      const Subject model = make_model(test);
      shard::FullyShardOptions options;
      options.units = {"blocks.*"};
      const comm::ProcessMesh mesh(world, layout::DeviceMesh({{"shard", 1}}, world->topology()));
      const shard::ShardedModel sharded = shard::fully_shard(*model.module, mesh, options);
      model.loss(rows(0, kRows)).backward();
      for (const auto& [name, gradient] : expected) {
        const at::Tensor found = sharded.full_gradient(name);
        EXPECT_TRUE(
            has_several_terms(test, name) ? at::allclose(found, gradient, 1e-5, 1e-8)
                                          : at::equal(found, gradient)
        ) << test.name
          << " " << name;
      }
    });
  }
}

}  // namespace
}  // namespace hypershard
