// Tests the GPT's names, construction, causality, hooks, recompute, slots and operator trace. Its
// numbers: gpt_golden_test.
#include "hypershard/model/gpt.h"

#include <cmath>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "hypershard/core/error.h"
#include "hypershard/nn/test_support.h"

namespace hypershard::model {
namespace {

using nn::testing::attach_slot;
using nn::testing::near;
using nn::testing::OperatorTrace;
using nn::testing::same_bits;

GptConfig tiny() {
  return {
      .vocab_size = 13,
      .num_layers = 2,
      .dim = 16,
      .num_heads = 4,
      .num_kv_heads = 2,
      .max_sequence = 8
  };
}

at::Tensor some_tokens() {
  return at::tensor({1, 5, 2, 12, 0, 7, 3, 3, 9, 4}, at::kLong).view({2, 5});
}

at::Tensor some_targets() {
  return at::tensor({5, 2, 12, 0, 7, 3, 3, 9, 4, 11}, at::kLong).view({2, 5});
}

TEST(GptTest, HasTheDocumentedNamesInOrder) {
  Gpt model(tiny());
  std::vector<std::string> expected = {"embed.weight"};
  for (const std::string block : {"blocks.0.", "blocks.1."}) {
    for (const char* name :
         {"attn_norm",
          "attn.wq",
          "attn.wk",
          "attn.wv",
          "attn.wo",
          "mlp_norm",
          "mlp.w1",
          "mlp.w3",
          "mlp.w2"}) {
      expected.push_back(block + name + ".weight");
    }
  }
  expected.push_back("norm.weight");
  expected.push_back("head.weight");
  EXPECT_EQ(model->named_parameters().keys(), expected);
  EXPECT_TRUE(model->buffers().empty());
  auto tied = tiny();
  tied.tie_embeddings = true;
  EXPECT_FALSE(Gpt(tied)->named_parameters().contains("head.weight"));
}

TEST(GptTest, StartsFromTheSeedWhateverTheDtype) {
  Gpt a(tiny(), GptOptions{.seed = 3});
  Gpt b(tiny(), GptOptions{.dtype = at::kBFloat16, .seed = 3});
  Gpt c(tiny(), GptOptions{.seed = 4});
  for (const auto& item : a->named_parameters()) {
    EXPECT_TRUE(same_bits(b->named_parameters()[item.key()], item.value().to(at::kBFloat16)))
        << item.key();
  }
  EXPECT_FALSE(same_bits(a->embed->weight, c->embed->weight));
  EXPECT_TRUE(same_bits(a->norm->weight, at::ones({16})));
}

TEST(GptTest, LossStartsNearTheLogarithmOfTheVocabulary) {
  Gpt model(tiny());
  EXPECT_NEAR(model->loss(some_tokens(), some_targets()).item<double>(), std::log(13.0), 0.05);
}

TEST(GptTest, IsBuiltOnTheMetaDeviceWithoutMemory) {
  Gpt model(tiny(), GptOptions{.device = at::kMeta, .dtype = at::kBFloat16});
  for (const auto& item : model->named_parameters()) {
    EXPECT_TRUE(item.value().is_meta()) << item.key();
    EXPECT_EQ(item.value().scalar_type(), at::kBFloat16) << item.key();
  }
}

TEST(GptTest, LogitsDependOnThePastOnly) {
  Gpt model(tiny(), GptOptions{.dtype = at::kDouble});
  auto changed = some_tokens().clone();
  changed[0][3] = 6;
  const auto before = model->logits(some_tokens());
  const auto after = model->logits(changed);
  EXPECT_EQ(before.sizes(), at::IntArrayRef({2, 5, 13}));
  EXPECT_TRUE(near(after[0].narrow(0, 0, 3), before[0].narrow(0, 0, 3), 1e-14));
  EXPECT_FALSE(near(after[0][3], before[0][3], 1e-6));
  EXPECT_FALSE(near(after[0][4], before[0][4], 1e-6));
  EXPECT_TRUE(near(after[1], before[1], 1e-14));
}

TEST(GptTest, WrongInputsAreNamed) {
  Gpt model(tiny());
  HS_EXPECT_THROWN(
      InvalidArgument,
      model->logits(at::zeros({1, 9}, at::kLong)),
      "9 positions (expected at most max_sequence, 8)"
  );
  HS_EXPECT_THROWN(
      InvalidArgument, model->logits(at::zeros({9}, at::kLong)), "tokens of shape [9]"
  );
  HS_EXPECT_THROWN(
      InvalidArgument, model->logits(at::full({1, 2}, 13, at::kLong)), "index 13 at position 0"
  );
  HS_EXPECT_THROWN(
      InvalidArgument,
      model->loss(some_tokens(), some_targets().narrow(1, 0, 4)),
      "do not fit targets of shape [2, 4]"
  );
}

class NotedHooks : public nn::ForwardHooks {
 public:
  NotedHooks(std::string name, std::vector<std::string>& log) : name_(std::move(name)), log_(log) {}
  void pre_forward(std::span<at::Tensor* const> inputs) override {
    log_.push_back(name_ + " takes " + std::to_string(inputs.size()));
  }
  void post_forward(std::span<at::Tensor* const> outputs) override {
    log_.push_back(name_ + " gives " + std::to_string(outputs.size()));
  }

 private:
  std::string name_;
  std::vector<std::string>& log_;
};

TEST(GptTest, EveryModuleWithParametersIsHookable) {
  Gpt model(tiny());
  for (const auto& item : model->named_modules()) {
    if (!item.value()->parameters(/*recurse=*/false).empty()) {
      EXPECT_NE(dynamic_cast<nn::HookPoint*>(item.value().get()), nullptr) << item.key();
    }
  }
  EXPECT_NE(dynamic_cast<nn::HookPoint*>(model->blocks[0].get()), nullptr);
}

TEST(GptTest, HooksOfRootAndBlocksSeeTensorsInAndOut) {
  Gpt model(tiny());
  std::vector<std::string> log;
  model->add_forward_hooks(std::make_shared<NotedHooks>("root", log));
  model->blocks->at<BlockImpl>(1).add_forward_hooks(std::make_shared<NotedHooks>("block", log));
  model->loss(some_tokens(), some_targets());
  EXPECT_EQ(
      log,
      std::vector<std::string>({"root takes 2", "block takes 1", "block gives 1", "root gives 1"})
  );
}

std::vector<at::Tensor> gradients_of(Gpt& model) {
  model->zero_grad();
  model->loss(some_tokens(), some_targets()).backward();
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : model->parameters()) {
    gradients.push_back(parameter.grad());
  }
  return gradients;
}

TEST(GptTest, RecomputedBlocksGiveTheSameBitsAlsoWithDropout) {
  for (const double dropout : {0.0, 0.3}) {
    auto config = tiny();
    config.dropout = dropout;
    Gpt plain(config);
    config.recompute = RecomputePolicy::kBlock;
    Gpt recomputed(config);
    at::manual_seed(1);
    const auto expected = gradients_of(plain);
    at::manual_seed(1);
    const auto actual = gradients_of(recomputed);
    ASSERT_EQ(actual.size(), expected.size());
    for (std::size_t i = 0; i < actual.size(); ++i) {
      EXPECT_TRUE(same_bits(actual[i], expected[i])) << "parameter " << i;
    }
  }
}

TEST(GptTest, DropoutActsInTrainingModeOnly) {
  auto config = tiny();
  config.dropout = 0.5;
  Gpt model(config);
  EXPECT_FALSE(same_bits(model->logits(some_tokens()), model->logits(some_tokens())));
  model->eval();
  EXPECT_TRUE(same_bits(model->logits(some_tokens()), model->logits(some_tokens())));
}

TEST(GptTest, SlotsTakeEveryGradientBitForBit) {
  for (const auto recompute : {RecomputePolicy::kNone, RecomputePolicy::kBlock}) {
    for (const bool tied : {false, true}) {
      auto config = tiny();
      config.recompute = recompute;
      config.tie_embeddings = tied;
      Gpt model(config);
      const auto plain = gradients_of(model);
      model->zero_grad();
      std::vector<std::shared_ptr<nn::testing::BufferSlot>> slots;
      for (const auto& parameter : model->parameters()) {
        slots.push_back(attach_slot(parameter, at::kFloat));
      }
      model->loss(some_tokens(), some_targets()).backward();
      for (std::size_t i = 0; i < slots.size(); ++i) {
        const auto name = model->named_parameters().keys()[i];
        EXPECT_FALSE(model->parameters()[i].grad().defined()) << name;
        if (tied && name == "embed.weight") {
          EXPECT_EQ(slots[i]->claims, 2);
          EXPECT_TRUE(near(slots[i]->buffer, plain[i], 1e-7));
        } else {
          EXPECT_EQ(slots[i]->claims, 1) << name;
          EXPECT_TRUE(same_bits(slots[i]->buffer, plain[i])) << name;
        }
      }
    }
  }
}

TEST(GptTest, AStepMovesNothingAndTakesTheFusedPath) {
  for (const std::int64_t kv_heads : {4, 2}) {
    auto config = tiny();
    config.dim = 32;  // heads of 8, which the fused attention takes
    config.num_kv_heads = kv_heads;
    Gpt model(config);
    std::vector<std::shared_ptr<nn::testing::BufferSlot>> slots;
    for (const auto& parameter : model->parameters()) {
      slots.push_back(attach_slot(parameter, at::kFloat));
    }
    const auto targets = some_targets();
    model->loss(some_tokens(), targets);  // makes the rotary table
    OperatorTrace trace;
    model->loss(some_tokens(), targets).backward();
    EXPECT_EQ(trace.count_movements(), 0) << kv_heads << " kv heads";
    EXPECT_EQ(trace.count("hypershard::attention_backward"), 2) << kv_heads << " kv heads";
  }
}

TEST(GptTest, ACloneComputesTheSameWithItsOwnParameters) {
  Gpt model(tiny());
  const auto copy = std::dynamic_pointer_cast<GptImpl>(model->clone());
  ASSERT_NE(copy, nullptr);
  EXPECT_TRUE(same_bits(copy->logits(some_tokens()), model->logits(some_tokens())));
  EXPECT_NE(copy->embed->weight.data_ptr(), model->embed->weight.data_ptr());
  const at::NoGradGuard no_grad;
  copy->blocks->at<BlockImpl>(0).attn->wq->weight.zero_();
  EXPECT_FALSE(same_bits(copy->logits(some_tokens()), model->logits(some_tokens())));
}

TEST(GptTest, Bf16LossIsNearFp32AndReportedInFp32) {
  Gpt wide(tiny());
  Gpt narrow(tiny(), GptOptions{.dtype = at::kBFloat16});
  const auto loss = narrow->loss(some_tokens(), some_targets());
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  EXPECT_NEAR(loss.item<double>(), wide->loss(some_tokens(), some_targets()).item<double>(), 0.02);
  loss.backward();
  EXPECT_EQ(narrow->head->weight.grad().scalar_type(), at::kBFloat16);
}

TEST(GptTest, TheCacheGivesTheLogitsOfTheWholeSequence) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    Gpt model(tiny(), GptOptions{.dtype = dtype});
    const at::NoGradGuard no_grad;
    const auto whole = model->logits(some_tokens());
    GptCache cache;
    auto last = model->forward(some_tokens().narrow(1, 0, 3), std::nullopt, &cache);
    EXPECT_EQ(last.sizes(), at::IntArrayRef({2, 1, 13}));
    const double tolerance = dtype == at::kFloat ? 1e-5 : 1e-13;
    EXPECT_TRUE(near(last.select(1, 0), whole.select(1, 2), tolerance));
    for (std::int64_t position = 3; position < 5; ++position) {
      last = model->forward(some_tokens().narrow(1, position, 1), std::nullopt, &cache);
      EXPECT_TRUE(near(last.select(1, 0), whole.select(1, position), tolerance))
          << "position " << position;
    }
    EXPECT_EQ(cache.length, 5);
    HS_EXPECT_THROWN(
        InvalidArgument,
        model->forward(some_tokens().narrow(1, 0, 2), std::nullopt, &cache),
        "one position at a time"
    );
  }
}

}  // namespace
}  // namespace hypershard::model
