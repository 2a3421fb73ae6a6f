// Compares logits, loss and every gradient of tiny GPTs with what tests/golden/make_gpt.py computed
// in PyTorch.
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <ATen/ATen.h>

#include "hypershard/model/gpt.h"
#include "hypershard/nn/test_support.h"

namespace hypershard::model {
namespace {

using nn::testing::near;

nlohmann::json golden_cases() {
  const char* folder = std::getenv("HS_TEST_GOLDEN_DIR");
  const std::string path = std::string(folder == nullptr ? "tests/golden" : folder) + "/gpt.json";
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << "no golden file at " << path
                           << "; run from the repository or set HS_TEST_GOLDEN_DIR";
  return nlohmann::json::parse(file);
}

GptConfig config_of(const nlohmann::json& golden) {
  const auto& c = golden.at("config");
  return {
      .vocab_size = c.at("vocab_size"),
      .num_layers = c.at("num_layers"),
      .dim = c.at("dim"),
      .num_heads = c.at("num_heads"),
      .num_kv_heads = c.at("num_kv_heads"),
      .hidden_dim = c.at("hidden_dim"),
      .max_sequence = c.at("max_sequence"),
      .rope_theta = c.at("rope_theta"),
      .norm_eps = c.at("norm_eps"),
      .tie_embeddings = c.at("tie_embeddings"),
  };
}

at::Tensor tensor_of(const nlohmann::json& values, at::ScalarType dtype, at::IntArrayRef sizes) {
  if (dtype == at::kLong) {
    return at::tensor(values.get<std::vector<std::int64_t>>(), at::kLong).view(sizes);
  }
  return at::tensor(values.get<std::vector<double>>(), at::kDouble).view(sizes);
}

// The formula of weights() in make_gpt.py.
void fill_by_formula(GptImpl& model) {
  const at::NoGradGuard no_grad;
  std::int64_t k = 0;
  for (auto& item : model.named_parameters()) {
    const bool is_norm = item.key().find("norm") != std::string::npos;
    auto flat = item.value().view({-1});
    for (std::int64_t e = 0; e < flat.numel(); ++e) {
      flat[e] = static_cast<double>((37 * e + 11 * k) % 101 - 50) / 64 + (is_norm ? 1 : 0);
    }
    ++k;
  }
}

void compare(
    const nlohmann::json& golden, at::ScalarType dtype, RecomputePolicy recompute, double tolerance
) {
  GptConfig config = config_of(golden);
  config.recompute = recompute;
  Gpt model(config, GptOptions{.dtype = dtype});
  fill_by_formula(*model);
  const std::int64_t batch = golden["config"]["batch"];
  const std::int64_t positions = golden["config"]["positions"];
  const auto tokens = tensor_of(golden["tokens"], at::kLong, {batch, positions});
  const auto targets = tensor_of(golden["targets"], at::kLong, {batch, positions});
  const auto logits =
      tensor_of(golden["logits"], at::kDouble, {batch, positions, config.vocab_size});
  EXPECT_TRUE(near(model->logits(tokens), logits, tolerance));
  const auto loss = model->loss(tokens, targets);
  EXPECT_NEAR(
      loss.item<double>(), golden["loss"].get<double>(), tolerance * golden["loss"].get<double>()
  );
  loss.backward();
  std::size_t compared = 0;
  for (const auto& item : model->named_parameters()) {
    SCOPED_TRACE(item.key());
    ASSERT_TRUE(golden["gradients"].contains(item.key()));
    const auto expected =
        tensor_of(golden["gradients"][item.key()], at::kDouble, item.value().sizes());
    EXPECT_TRUE(near(item.value().grad(), expected, tolerance));
    EXPECT_GT(expected.abs().max().item<double>(), 5 * tolerance)
        << "this parameter would not be tested";
    ++compared;
  }
  EXPECT_EQ(compared, golden["gradients"].size());
}

class GptGoldenTest : public ::testing::TestWithParam<RecomputePolicy> {};

TEST_P(GptGoldenTest, Fp64EqualsPyTorch) {
  for (const auto& golden : golden_cases()) {
    SCOPED_TRACE(golden["config"]["name"].get<std::string>());
    compare(golden, at::kDouble, GetParam(), 1e-12);
  }
}

TEST_P(GptGoldenTest, Fp32EqualsPyTorch) {
  for (const auto& golden : golden_cases()) {
    SCOPED_TRACE(golden["config"]["name"].get<std::string>());
    compare(golden, at::kFloat, GetParam(), 1e-5);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Recompute,
    GptGoldenTest,
    ::testing::Values(RecomputePolicy::kNone, RecomputePolicy::kBlock),
    [](const auto& made) { return made.param == RecomputePolicy::kNone ? "None" : "Block"; }
);

}  // namespace
}  // namespace hypershard::model
