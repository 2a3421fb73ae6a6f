// Tests picking tokens from a distribution and generating with a cache.
#include "hypershard/model/sample.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "hypershard/core/error.h"
#include "hypershard/model/gpt.h"
#include "hypershard/nn/test_support.h"

namespace hypershard::model {
namespace {

// Probabilities 0.1, 0.4, 0.2, 0.3 at temperature 1.
std::vector<float> some_logits() {
  return {std::log(0.1F), std::log(0.4F), std::log(0.2F), std::log(0.3F)};
}

SampleOptions plain() {
  return {.temperature = 1.0};
}

TEST(SampleTest, PicksByCumulativeProbabilityFromTheLikeliestDown) {
  EXPECT_EQ(pick_token(some_logits(), plain(), 0.0), 1);
  EXPECT_EQ(pick_token(some_logits(), plain(), 0.39), 1);
  EXPECT_EQ(pick_token(some_logits(), plain(), 0.41), 3);
  EXPECT_EQ(pick_token(some_logits(), plain(), 0.69), 3);
  EXPECT_EQ(pick_token(some_logits(), plain(), 0.71), 2);
  EXPECT_EQ(pick_token(some_logits(), plain(), 0.91), 0);
  EXPECT_EQ(pick_token(some_logits(), plain(), std::nextafter(1.0, 0.0)), 0);
}

TEST(SampleTest, TemperatureZeroTakesTheFirstOfTheLikeliest) {
  const std::vector<float> tied = {1, 3, 3, 2};
  EXPECT_EQ(pick_token(tied, {.temperature = 0}, 0.99), 1);
}

TEST(SampleTest, LowTemperatureSharpens) {
  // At 1/2 the probabilities go as squares: 0.16 / 0.30 for the likeliest.
  EXPECT_EQ(pick_token(some_logits(), {.temperature = 0.5}, 0.53), 1);
  EXPECT_EQ(pick_token(some_logits(), {.temperature = 0.5}, 0.54), 3);
}

TEST(SampleTest, TopKAndTopPCutTheTail) {
  auto options = plain();
  options.top_k = 2;
  EXPECT_EQ(pick_token(some_logits(), options, 0.56), 1);
  EXPECT_EQ(pick_token(some_logits(), options, 0.58), 3);
  EXPECT_EQ(pick_token(some_logits(), options, 0.999), 3);
  options.top_k = 100;
  EXPECT_EQ(pick_token(some_logits(), options, 0.999), 0);
  auto nucleus = plain();
  nucleus.top_p = 0.65;
  EXPECT_EQ(pick_token(some_logits(), nucleus, 0.999), 3)
      << "0.4 + 0.3 is the first sum that reaches 0.65";
  nucleus.top_p = 0.3;
  EXPECT_EQ(pick_token(some_logits(), nucleus, 0.999), 1) << "the likeliest token is always kept";
}

TEST(SampleTest, FrequenciesFollowTheDistribution) {
  std::vector<int> counts(4);
  constexpr int kDraws = 10000;
  for (int i = 0; i < kDraws; ++i) {
    ++counts[static_cast<std::size_t>(pick_token(some_logits(), plain(), (i + 0.5) / kDraws))];
  }
  EXPECT_NEAR(counts[0], 1000, 2);
  EXPECT_NEAR(counts[1], 4000, 2);
  EXPECT_NEAR(counts[2], 2000, 2);
  EXPECT_NEAR(counts[3], 3000, 2);
}

Gpt tiny_model() {
  Gpt model(GptConfig{
      .vocab_size = 17,
      .num_layers = 2,
      .dim = 16,
      .num_heads = 2,
      .max_sequence = 12,
      .init_std = 0.3
  });
  return model;
}

TEST(SampleTest, IsDeterministicAndDependsOnTheSeed) {
  auto model = tiny_model();
  const auto run = [&](std::uint64_t seed) {
    return generate(*model, {1, 2, 3}, {.max_new_tokens = 40, .temperature = 1, .seed = seed});
  };
  EXPECT_EQ(run(5), run(5));
  EXPECT_NE(run(5), run(6));
  EXPECT_EQ(run(5).size(), 40);
}

// What generate() must give while the context has room: the likeliest token of a full forward each
// time.
TEST(SampleTest, GreedyEqualsForwardingEverythingAnew) {
  auto model = tiny_model();
  std::vector<std::int64_t> tokens = {1, 2, 3};
  const at::NoGradGuard no_grad;
  while (tokens.size() < 12) {
    const auto input = at::tensor(tokens, at::kLong).unsqueeze(0);
    tokens.push_back(model->logits(input)[0][-1].argmax().item<std::int64_t>());
  }
  const auto generated = generate(*model, {1, 2, 3}, {.max_new_tokens = 9, .temperature = 0});
  EXPECT_EQ(generated, std::vector<std::int64_t>(tokens.begin() + 3, tokens.end()));
}

TEST(SampleTest, GoesOnFromTheLaterHalfWhenTheContextIsFull) {
  auto model = tiny_model();
  const std::vector<std::int64_t> prompt = {
      1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12
  };  // fills the context
  const auto generated = generate(*model, prompt, {.max_new_tokens = 2, .temperature = 0});
  const at::NoGradGuard no_grad;
  const auto likeliest_after = [&](const std::vector<std::int64_t>& context) {
    return model->logits(at::tensor(context, at::kLong).unsqueeze(0))[0][-1]
        .argmax()
        .item<std::int64_t>();
  };
  EXPECT_EQ(generated[0], likeliest_after(prompt));
  EXPECT_EQ(generated[1], likeliest_after({8, 9, 10, 11, 12, generated[0]}));
}

TEST(SampleTest, UsesTheEndOfAPromptLongerThanTheContext) {
  auto model = tiny_model();
  std::vector<std::int64_t> prompt(30, 4);
  for (std::int64_t i = 0; i < 12; ++i) {
    prompt[static_cast<std::size_t>(18 + i)] = i;
  }
  const std::vector<std::int64_t> end(prompt.begin() + 18, prompt.end());
  const SampleOptions one = {.max_new_tokens = 1, .temperature = 0};
  EXPECT_EQ(generate(*model, prompt, one), generate(*model, end, one));
}

TEST(SampleTest, ReportsTokensAsTheyComeAndStopsWhenAsked) {
  auto model = tiny_model();
  std::vector<std::int64_t> seen;
  const auto generated =
      generate(*model, {1}, {.max_new_tokens = 20, .on_token = [&](std::int64_t token) {
                               seen.push_back(token);
                               return seen.size() < 5;
                             }});
  EXPECT_EQ(generated.size(), 5);
  EXPECT_EQ(generated, seen);
}

TEST(SampleTest, PutsTheTrainingModeBackAndRecordsNoGraph) {
  auto model = tiny_model();
  ASSERT_TRUE(model->is_training());
  generate(*model, {1}, {.max_new_tokens = 1});
  EXPECT_TRUE(model->is_training());
  model->eval();
  generate(*model, {1}, {.max_new_tokens = 1});
  EXPECT_FALSE(model->is_training());
  EXPECT_TRUE(at::GradMode::is_enabled());
}

TEST(SampleTest, WrongOptionsAreNamed) {
  auto model = tiny_model();
  HS_EXPECT_THROWN(InvalidArgument, generate(*model, {}, {}), "the prompt is empty");
  HS_EXPECT_THROWN(
      InvalidArgument,
      generate(*model, {1}, {.temperature = -1}),
      "temperature must not be negative (got -1)"
  );
  HS_EXPECT_THROWN(InvalidArgument, generate(*model, {1}, {.top_k = -1}), "top_k");
  HS_EXPECT_THROWN(
      InvalidArgument, generate(*model, {1}, {.top_p = 0}), "top_p must be in (0, 1] (got 0)"
  );
}

}  // namespace
}  // namespace hypershard::model
