// Gradients that layers write into the engine's buffers are those that autograd makes: for every
// way in which a parameter can meet its gradient more or less than once.
#include <map>
#include <memory>
#include <string>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "hypershard/model/gpt.h"
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
    // 8 bits of every product and sum, in three blocks.
    {.name = "bf16", .bf16 = true, .bound = 0.06},
};

model::Gpt make_model(const Case& test) {
  model::Gpt model(model::GptConfig{
      .vocab_size = 40,
      .num_layers = 3,
      .dim = 32,
      .num_heads = 2,
      .num_kv_heads = 1,
      .max_sequence = 12,
      .tie_embeddings = test.tied,
      .recompute = test.recompute ? model::RecomputePolicy::kBlock : model::RecomputePolicy::kNone
  });
  for (const auto& item : model->named_parameters()) {
    const std::string frozen = test.frozen;
    if (!frozen.empty() && item.key().starts_with(frozen)) {
      item.value().requires_grad_(false);
    }
  }
  return model;
}

constexpr int kRows = 24;

at::Tensor rows(int first, int count) {
  return at::arange(kRows * 13, at::kLong)
      .mul(11)
      .add(3)
      .remainder(40)
      .view({kRows, 13})
      .narrow(0, first, count);
}

at::Tensor loss_of(model::Gpt& model, const at::Tensor& batch) {
  return model->loss(batch.narrow(1, 0, 12), batch.narrow(1, 1, 12));
}

/// Autograd's own, of the mean over all rows.
Gradients plain_gradients(const Case& test) {
  model::Gpt model = make_model(test);
  loss_of(model, rows(0, kRows)).backward();
  Gradients gradients;
  for (const auto& item : model->named_parameters()) {
    if (item.value().grad().defined()) {
      gradients[item.key()] = item.value().grad();
    }
  }
  return gradients;
}

class FusedGradientTest : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(All, FusedGradientTest, ::testing::ValuesIn(kCases), [](const auto& each) {
  return std::string(each.param.name);
});

TEST_P(FusedGradientTest, EqualsAutogradsForEveryAccumulation) {
  const Case& test = GetParam();
  const Gradients expected = plain_gradients(test);
  testing::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
    for (const int accumulation : {1, 2, 3, 4}) {
      model::Gpt model = make_model(test);
      shard::FullyShardOptions options;
      options.units = {"blocks.*"};
      if (test.bf16) {
        options.precision.compute = at::kBFloat16;
        options.precision.reduce = at::kFloat;
      }
      const comm::ProcessMesh mesh(world, layout::DeviceMesh({{"shard", 2}}, world->topology()));
      const shard::ShardedModel sharded = shard::fully_shard(*model, mesh, options);
      const int count = kRows / 2 / accumulation;
      for (int micro = 0; micro < accumulation; ++micro) {
        sharded.set_requires_gradient_sync(micro + 1 == accumulation);
        const int first = (micro * 2 + world->rank()) * count;
        (loss_of(model, rows(first, count)) / accumulation).backward();
      }
      EXPECT_EQ(sharded.counters().copied_bytes, 0);
      for (const auto& [name, gradient] : expected) {
        const at::Tensor found = sharded.full_gradient(name);
        ASSERT_TRUE(found.defined()) << name;
        EXPECT_EQ(found.scalar_type(), at::kFloat) << name;
        const double scale = gradient.abs().max().item<double>();
        EXPECT_LE((found - gradient).abs().max().item<double>(), test.bound * scale)
            << name << " accumulation " << accumulation;
      }
    }
  });
}

// On one rank nothing is summed in another order: the same GEMMs give the same bits.
TEST(FusedGradientBitsTest, OneRankGivesAutogradsBits) {
  for (const Case& test : kCases) {
    if (test.bf16) {
      continue;  // autograd has no bf16 model with fp32 gradients
    }
    const Gradients expected = plain_gradients(test);
    testing::run_ranks(1, [&](const std::shared_ptr<comm::World>& world) {
      model::Gpt model = make_model(test);
      shard::FullyShardOptions options;
      options.units = {"blocks.*"};
      const comm::ProcessMesh mesh(world, layout::DeviceMesh({{"shard", 1}}, world->topology()));
      const shard::ShardedModel sharded = shard::fully_shard(*model, mesh, options);
      loss_of(model, rows(0, kRows)).backward();
      for (const auto& [name, gradient] : expected) {
        // A tied table is written by the head and added to by the embedding, in fp32 either way.
        const bool is_tied = test.tied && name == "embed.weight";
        const at::Tensor found = sharded.full_gradient(name);
        EXPECT_TRUE(
            is_tied ? at::allclose(found, gradient, 1e-5, 1e-8) : at::equal(found, gradient)
        ) << test.name
          << " " << name;
      }
    });
  }
}

}  // namespace
}  // namespace hypershard
