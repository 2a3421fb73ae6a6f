// Tests the derived numbers of a GPT's shape and the messages of impossible ones.
#include "hypershard/model/gpt_config.h"

#include <cmath>

#include <gtest/gtest.h>

#include "hypershard/core/error.h"
#include "hypershard/model/gpt.h"
#include "hypershard/nn/test_support.h"

namespace hypershard::model {
namespace {

GptConfig small() {
  return {
      .vocab_size = 50,
      .num_layers = 3,
      .dim = 24,
      .num_heads = 6,
      .num_kv_heads = 2,
      .max_sequence = 16
  };
}

TEST(GptConfigTest, FillsInHeadsAndHiddenSize) {
  EXPECT_EQ(checked({.dim = 512, .num_heads = 8}).hidden_dim, 1408);
  EXPECT_EQ(checked({.dim = 192, .num_heads = 4}).hidden_dim, 512);
  EXPECT_EQ(checked({.dim = 512, .num_heads = 8, .hidden_multiple = 256}).hidden_dim, 1536);
  EXPECT_EQ(checked({.dim = 512, .num_heads = 8, .hidden_dim = 100}).hidden_dim, 100);
  EXPECT_EQ(checked({.dim = 512, .num_heads = 8}).num_kv_heads, 8);
}

TEST(GptConfigTest, ImpossibleShapesNameFieldAndValue) {
  HS_EXPECT_THROWN(
      InvalidArgument, checked({.vocab_size = 0}), "vocab_size must be positive (got 0)"
  );
  HS_EXPECT_THROWN(
      InvalidArgument, checked({.dim = 10, .num_heads = 3}), "dim 10 does not divide into 3 heads"
  );
  HS_EXPECT_THROWN(InvalidArgument, checked({.dim = 9, .num_heads = 3}), "heads of an even size");
  HS_EXPECT_THROWN(
      InvalidArgument,
      checked({.num_heads = 4, .num_kv_heads = 3}),
      "num_heads 4 is no multiple of num_kv_heads 3"
  );
  HS_EXPECT_THROWN(InvalidArgument, checked({.dropout = 1.0}), "dropout must be in [0, 1) (got 1)");
  HS_EXPECT_THROWN(InvalidArgument, checked({.rope_theta = 0}), "rope_theta");
}

TEST(GptConfigTest, CountsTheParametersThatTheModelHas) {
  for (const bool tied : {false, true}) {
    auto config = small();
    config.tie_embeddings = tied;
    Gpt model(config, GptOptions{.device = at::kMeta});
    std::int64_t count = 0;
    for (const auto& parameter : model->parameters()) {
      count += parameter.numel();
    }
    EXPECT_EQ(num_parameters(config), count);
  }
}

TEST(GptConfigTest, CountsSixOperationsAMatrixParameterAndTokenPlusAttention) {
  const GptConfig config = {
      .vocab_size = 7, .num_layers = 2, .dim = 8, .num_heads = 2, .hidden_dim = 10
  };
  const double matrices = 2 * (4 * 8 * 8 + 3 * 8 * 10) + 7 * 8;
  EXPECT_EQ(flops_per_token(config, 5), 6 * matrices + 12 * 2 * 8 * 5);
  auto tied = config;
  tied.tie_embeddings = true;
  EXPECT_EQ(flops_per_token(tied, 5), flops_per_token(config, 5))
      << "a tied table is multiplied with all the same";
}

TEST(GptConfigTest, BranchesStartSmallerAndNormsAtOne) {
  const auto init = gpt_init(small());
  EXPECT_EQ(init("blocks.1.attn.wq.weight", {}).std, 0.02);
  EXPECT_EQ(init("embed.weight", {}).std, 0.02);
  EXPECT_DOUBLE_EQ(init("blocks.1.attn.wo.weight", {}).std, 0.02 / std::sqrt(6.0));
  EXPECT_DOUBLE_EQ(init("blocks.1.mlp.w2.weight", {}).std, 0.02 / std::sqrt(6.0));
  for (const char* name :
       {"norm.weight", "blocks.0.attn_norm.weight", "blocks.0.mlp_norm.weight"}) {
    EXPECT_EQ(init(name, {}).kind, nn::InitKind::kConstant);
    EXPECT_EQ(init(name, {}).mean, 1);
  }
}

}  // namespace
}  // namespace hypershard::model
