// Tests that first values depend on name and index alone, and have the asked-for distribution.
#include "hypershard/nn/init.h"

#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "hypershard/core/error.h"
#include "hypershard/core/random.h"
#include "hypershard/nn/linear.h"
#include "hypershard/nn/test_support.h"

namespace hypershard::nn {
namespace {

using testing::same_bits;

at::Tensor filled(
    const Init& init, std::int64_t n, at::ScalarType dtype, std::string_view name = "w"
) {
  auto out = at::empty({n}, at::TensorOptions().dtype(dtype));
  fill_range(out, init, 7, name, 0);
  return out;
}

std::vector<Init> all_kinds() {
  return {
      Init::constant(3),
      Init::normal(1, 0.5),
      Init::trunc_normal(0, 1, -0.5, 2),
      Init::uniform(-2, 6),
  };
}

TEST(InitTest, PiecesOfAnyCutGiveTheBitsOfTheWhole) {
  for (const auto& init : all_kinds()) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      const auto whole = filled(init, 40001, dtype);
      auto pieces = at::empty_like(whole);
      std::int64_t begin = 0;
      for (const std::int64_t length : {1, 0, 2, 333, 19999, 1, 19665}) {
        fill_range(pieces.narrow(0, begin, length), init, 7, "w", begin);
        begin += length;
      }
      ASSERT_EQ(begin, whole.numel());
      EXPECT_TRUE(same_bits(pieces, whole))
          << "kind " << static_cast<int>(init.kind) << " " << dtype;
    }
  }
}

TEST(InitTest, LowPrecisionIsTheRoundedFp32Draw) {
  for (const auto& init : all_kinds()) {
    EXPECT_TRUE(same_bits(
        filled(init, 1000, at::kBFloat16), filled(init, 1000, at::kFloat).to(at::kBFloat16)
    ));
    EXPECT_TRUE(
        same_bits(filled(init, 1000, at::kFloat), filled(init, 1000, at::kDouble).to(at::kFloat))
    );
  }
}

TEST(InitTest, NameAndSeedChooseTheNumbers) {
  const auto init = Init::normal(0, 1);
  const auto w = filled(init, 100, at::kFloat);
  EXPECT_FALSE(same_bits(filled(init, 100, at::kFloat, "v"), w));
  auto other_seed = at::empty({100});
  fill_range(other_seed, init, 8, "w", 0);
  EXPECT_FALSE(same_bits(other_seed, w));
  EXPECT_EQ(w[3].item<float>(), static_cast<float>(normal_at(7, stream_of("w"), 3)));
}

TEST(InitTest, HasTheAskedForDistribution) {
  constexpr std::int64_t kN = 100000;
  const auto normal = filled(Init::normal(1, 0.5), kN, at::kDouble);
  EXPECT_NEAR(normal.mean().item<double>(), 1, 0.01);
  EXPECT_NEAR(normal.std().item<double>(), 0.5, 0.01);
  const auto uniform = filled(Init::uniform(-2, 6), kN, at::kDouble);
  EXPECT_NEAR(uniform.mean().item<double>(), 2, 0.05);
  EXPECT_GE(uniform.min().item<double>(), -2);
  EXPECT_LE(uniform.max().item<double>(), 6);
  const auto cut = filled(Init::trunc_normal(0, 1, -0.5, 2), kN, at::kDouble);
  EXPECT_GE(cut.min().item<double>(), -0.5);
  EXPECT_LE(cut.max().item<double>(), 2);
  EXPECT_GT(cut.max().item<double>(), 1.9);
  EXPECT_TRUE(same_bits(filled(Init::constant(3), 5, at::kFloat), at::full({5}, 3.0F)));
}

TEST(InitTest, RefusesTensorsThatCanNotBeFilled) {
  const auto init = Init::normal(0, 1);
  HS_EXPECT_THROWN(
      InvalidArgument, fill_range(at::empty({2, 2}), init, 1, "blocks.0.w", 0), "'blocks.0.w'"
  );
  HS_EXPECT_THROWN(
      InvalidArgument, fill_range(at::empty({4}).slice(0, 0, 4, 2), init, 1, "w", 0), "contiguous"
  );
  HS_EXPECT_THROWN(
      InvalidArgument, fill_range(at::empty({4}, at::kLong), init, 1, "w", 0), "floating point"
  );
  HS_EXPECT_THROWN(InvalidArgument, fill_range(at::empty({4}), init, 1, "w", -1), "negative");
}

TEST(InitTest, InitializesModulesByNameAndShape) {
  Linear module(LinearOptions{.in = 3, .out = 5, .bias = true});
  std::vector<std::string> seen;
  initialize_module(
      *module,
      [&](std::string_view name, at::IntArrayRef shape) {
        seen.push_back(std::string(name) + std::to_string(shape.size()));
        return name == "bias" ? Init::constant(2) : Init::normal(0, 1);
      },
      7
  );
  EXPECT_EQ(seen, std::vector<std::string>({"weight2", "bias1"}));
  EXPECT_TRUE(same_bits(
      module->weight.detach().view({-1}), filled(Init::normal(0, 1), 15, at::kFloat, "weight")
  ));
  EXPECT_TRUE(same_bits(module->bias, at::full({5}, 2.0F)));
}

TEST(InitTest, RefusesMetaModulesByName) {
  Linear module(LinearOptions{.in = 3, .out = 5, .device = at::kMeta});
  HS_EXPECT_THROWN(
      InvalidArgument,
      initialize_module(
          *module, [](auto, auto) { return Init{}; }, 1
      ),
      "parameter 'weight' is on the meta device"
  );
}

}  // namespace
}  // namespace hypershard::nn
