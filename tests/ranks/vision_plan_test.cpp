// Models that are no transformer decoders under a plan: a convolutional network and a vision
// transformer, their batch cut over `dp` and their widest layers over `tp`. Validation raises no
// alarm, and gradients are those of the whole batch on one rank.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "hypershard/comm/world.h"
#include "hypershard/layout/sharding.h"
#include "hypershard/nn/hooks.h"
#include "hypershard/plan/apply.h"
#include "hypershard/plan/gradient_equivalence.h"
#include "hypershard/plan/layout_error.h"
#include "hypershard/plan/validation.h"
#include "hypershard/testing/run_ranks.h"

namespace hypershard {
namespace {

using layout::Layout;
using layout::Placement;

constexpr std::int64_t kImages = 6;
constexpr std::int64_t kSize = 8;  // of an image's side
constexpr std::int64_t kClasses = 5;

/// A module of one tensor argument. Its parameters are filled with those of the model around it.
template <class Derived>
struct Layer : nn::Hookable<Derived, at::Tensor(const at::Tensor&), torch::nn::Module> {
  at::Tensor parameter(const char* name, at::IntArrayRef sizes) {
    return this->register_parameter(name, at::zeros(sizes, at::kDouble));
  }
};

void fill_by_formula(torch::nn::Module& model) {
  const at::NoGradGuard no_grad;
  double phase = 0.1;
  for (const at::Tensor& parameter : model.parameters()) {
    const at::Tensor values = at::arange(parameter.numel(), at::kDouble).mul(0.7).add(phase).sin();
    parameter.copy_(values.mul(0.4).view(parameter.sizes()));
    phase += 1.3;
  }
}

struct ConvImpl : Layer<ConvImpl> {
  ConvImpl(std::int64_t in, std::int64_t out, std::int64_t width, std::int64_t stride_in = 1)
      : weight(parameter("weight", {out, in, width, width})),
        bias(parameter("bias", {out})),
        stride(stride_in),
        padding(stride_in == 1 ? width / 2 : 0) {}
  at::Tensor forward_impl(const at::Tensor& x) {
    return at::conv2d(x, weight, bias, stride, padding);
  }
  at::Tensor weight, bias;
  std::int64_t stride, padding;
};
TORCH_MODULE(Conv);

struct DenseImpl : Layer<DenseImpl> {
  DenseImpl(std::int64_t in, std::int64_t out, bool has_bias = true)
      : weight(parameter("weight", {out, in})) {
    if (has_bias) {
      bias = parameter("bias", {out});
    }
  }
  at::Tensor forward_impl(const at::Tensor& x) {
    return bias.defined() ? at::linear(x, weight, bias) : at::linear(x, weight);
  }
  at::Tensor weight, bias;
};
TORCH_MODULE(Dense);

/// Batch norm as in evaluation: statistics are given.
struct FrozenBatchNormImpl : Layer<FrozenBatchNormImpl> {
  explicit FrozenBatchNormImpl(std::int64_t channels)
      : weight(parameter("weight", {channels})), bias(parameter("bias", {channels})) {
    const at::Tensor numbers = at::arange(channels, at::kDouble);
    mean = register_buffer("running_mean", numbers.mul(0.05));
    variance = register_buffer("running_var", numbers.mul(0.1).add(0.5));
  }
  at::Tensor forward_impl(const at::Tensor& x) {
    return at::batch_norm(
        x, weight, bias, mean, variance, /*training=*/false, 0.1, 1e-5, /*cudnn_enabled=*/false
    );
  }
  at::Tensor weight, bias, mean, variance;
};
TORCH_MODULE(FrozenBatchNorm);

struct GroupNormImpl : Layer<GroupNormImpl> {
  GroupNormImpl(std::int64_t groups_in, std::int64_t channels)
      : weight(parameter("weight", {channels})),
        bias(parameter("bias", {channels})),
        groups(groups_in) {}
  at::Tensor forward_impl(const at::Tensor& x) { return at::group_norm(x, groups, weight, bias); }
  at::Tensor weight, bias;
  std::int64_t groups;
};
TORCH_MODULE(GroupNorm);

struct LayerNormImpl : Layer<LayerNormImpl> {
  explicit LayerNormImpl(std::int64_t dim)
      : weight(parameter("weight", {dim})), bias(parameter("bias", {dim})) {}
  at::Tensor forward_impl(const at::Tensor& x) {
    return at::layer_norm(x, {x.size(-1)}, weight, bias);
  }
  at::Tensor weight, bias;
};
TORCH_MODULE(LayerNorm);

/// conv, group norm, relu, conv, linear: channels of the second convolution may be cut.
struct ConvHeadImpl : Layer<ConvHeadImpl> {
  ConvHeadImpl() : conv(8, 12, 3), linear(12 * 4, kClasses, /*has_bias=*/false) {
    register_module("conv", conv);
    register_module("linear", linear);
  }
  at::Tensor forward_impl(const at::Tensor& x) {
    const at::Tensor pooled = at::adaptive_avg_pool2d(at::relu(conv->forward(x)), {2, 2});
    return linear->forward(at::flatten(pooled, 1));
  }
  Conv conv;
  Dense linear;
};
TORCH_MODULE(ConvHead);

/// Returns the mean loss over images [n, 3, side, side] and labels [n].
template <class Derived>
using Classifier =
    nn::Hookable<Derived, at::Tensor(const at::Tensor&, const at::Tensor&), torch::nn::Module>;

struct CnnImpl : Classifier<CnnImpl> {
  CnnImpl() : conv1(3, 8, 3), norm1(8), conv2(8, 8, 3), norm2(4, 8) {
    register_module("conv1", conv1);
    register_module("norm1", norm1);
    register_module("conv2", conv2);
    register_module("norm2", norm2);
    register_module("head", head);
    fill_by_formula(*this);
  }
  at::Tensor forward_impl(const at::Tensor& images, const at::Tensor& labels) {
    at::Tensor x = at::max_pool2d(at::relu(norm1->forward(conv1->forward(images))), {2, 2});
    x = x + at::relu(norm2->forward(conv2->forward(x)));
    return at::cross_entropy_loss(head->forward(x), labels);
  }
  static plan::ShardingPlan sharding_plan() {
    plan::ShardingPlan plan;
    plan.parameter("head.conv.*", {{"tp", Placement::shard(0)}})
        .parameter("head.linear.weight", {{"tp", Placement::shard(1)}})
        .input("head", {{"tp", Placement::replicate()}})
        .output("head", {{"tp", Placement::replicate()}});
    return plan;
  }
  Conv conv1;
  FrozenBatchNorm norm1;
  Conv conv2;
  GroupNorm norm2;
  ConvHead head;
};
TORCH_MODULE(Cnn);

constexpr std::int64_t kDim = 16;
constexpr std::int64_t kHeads = 4;
constexpr std::int64_t kPatch = 4;

struct AttentionImpl : Layer<AttentionImpl> {
  AttentionImpl()
      : q(kDim, kDim), k(kDim, kDim), v(kDim, kDim), proj(kDim, kDim, /*has_bias=*/false) {
    register_module("q", q);
    register_module("k", k);
    register_module("v", v);
    register_module("proj", proj);
  }
  static at::Tensor heads(const at::Tensor& x) {
    return x.view({x.size(0), x.size(1), -1, kDim / kHeads}).transpose(1, 2);
  }
  at::Tensor forward_impl(const at::Tensor& x) {
    const at::Tensor mixed = at::scaled_dot_product_attention(
        heads(q->forward(x)), heads(k->forward(x)), heads(v->forward(x))
    );
    return proj->forward(mixed.transpose(1, 2).reshape({x.size(0), x.size(1), -1}));
  }
  Dense q, k, v, proj;
};
TORCH_MODULE(Attention);

struct FeedForwardImpl : Layer<FeedForwardImpl> {
  FeedForwardImpl() : up(kDim, 3 * kDim), down(3 * kDim, kDim, /*has_bias=*/false) {
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward_impl(const at::Tensor& x) { return down->forward(at::gelu(up->forward(x))); }
  Dense up, down;
};
TORCH_MODULE(FeedForward);

/// Patches, a class token, one block, and a head on the class token.
struct VitImpl : Classifier<VitImpl> {
  VitImpl() : patches(3, kDim, kPatch, kPatch), norm1(kDim), norm2(kDim), head(kDim, kClasses) {
    const std::int64_t tokens = 1 + (kSize / kPatch) * (kSize / kPatch);
    class_token = register_parameter("class_token", at::zeros({1, 1, kDim}, at::kDouble));
    positions = register_parameter("positions", at::zeros({1, tokens, kDim}, at::kDouble));
    register_module("patches", patches);
    register_module("norm1", norm1);
    register_module("attn", attn);
    register_module("norm2", norm2);
    register_module("mlp", mlp);
    register_module("head", head);
    fill_by_formula(*this);
  }
  at::Tensor forward_impl(const at::Tensor& images, const at::Tensor& labels) {
    const at::Tensor rows = patches->forward(images).flatten(2).transpose(1, 2);
    const at::Tensor first = at::zeros_like(rows.select(1, 0)).unsqueeze(1) + class_token;
    at::Tensor x = at::cat({first, rows}, 1) + positions;
    x = x + attn->forward(norm1->forward(x));
    x = x + mlp->forward(norm2->forward(x));
    return at::cross_entropy_loss(head->forward(x.select(1, 0)), labels);
  }
  static plan::ShardingPlan sharding_plan() {
    plan::ShardingPlan plan;
    plan.parameter("attn.{q,k,v}.*", {{"tp", Placement::shard(0)}})
        .parameter("attn.proj.weight", {{"tp", Placement::shard(1)}})
        .parameter("mlp.up.*", {{"tp", Placement::shard(0)}})
        .parameter("mlp.down.weight", {{"tp", Placement::shard(1)}})
        .input("{attn,mlp}", {{"tp", Placement::replicate()}})
        .output("{attn,mlp}", {{"tp", Placement::replicate()}});
    return plan;
  }
  Conv patches;
  LayerNorm norm1;
  Attention attn;
  LayerNorm norm2;
  FeedForward mlp;
  Dense head;
  at::Tensor class_token, positions;
};
TORCH_MODULE(Vit);

at::Tensor rows_of(const at::Tensor& whole, const comm::ProcessMesh& mesh) {
  const std::int64_t rows = whole.size(0) / mesh.mesh().axis_size("dp");
  return whole.narrow(0, rows * mesh.mesh().coordinate(mesh.rank(), "dp"), rows).clone();
}

template <class Model>
void expect_validated_and_equal(const std::shared_ptr<comm::World>& world, int dp, int tp) {
  const auto mesh = std::make_shared<const comm::ProcessMesh>(
      world, layout::DeviceMesh({{"dp", dp}, {"tp", tp}}, world->topology())
  );
  const at::Tensor images = at::arange(kImages * 3 * kSize * kSize, at::kDouble)
                                .mul(0.37)
                                .cos()
                                .view({kImages, 3, kSize, kSize});
  const at::Tensor labels = at::arange(kImages, at::kLong).mul(3).remainder(kClasses);
  Model whole;
  whole->forward(images, labels).backward();

  Model model;
  const at::Tensor x = rows_of(images, *mesh);
  const at::Tensor y = rows_of(labels, *mesh);
  const Layout batch{{Placement::shard(0), Placement::replicate()}};
  const auto applied = plan::apply_plan(
      *model,
      Model::Impl::sharding_plan(),
      mesh,
      {{x, {images.sizes().vec(), batch}, "images"}, {y, {labels.sizes().vec(), batch}, "labels"}},
      [&] { return std::vector<at::Tensor>{model->forward(x, y)}; },
      {.data_axes = {"dp"}}
  );
  for (const auto level : {plan::ValidationLevel::kModules, plan::ValidationLevel::kOperators}) {
    model->zero_grad();
    plan::ValidationGuard guard(*model, applied, {.level = level});
    model->forward(x, y).backward();
    guard.finish();
    const plan::ValidationCounts counts = guard.counts();
    EXPECT_EQ(counts.backwards, 1);
    EXPECT_GT(counts.operators, 10);
    EXPECT_GT(counts.values, 10);
  }
  for (const at::Tensor& parameter : model->parameters()) {
    mesh->axis("dp")->all_reduce(parameter.grad())->wait();
  }
  const auto report = plan::gradient_equivalence(applied, plan::named_gradients(*whole), 1.0 / dp);
  EXPECT_TRUE(report.passed) << to_text(report);
  EXPECT_EQ(report.rows.size(), whole->parameters().size());
}

class VisionPlanTest : public ::testing::TestWithParam<std::pair<int, int>> {};
INSTANTIATE_TEST_SUITE_P(
    Meshes,
    VisionPlanTest,
    ::testing::Values(
        std::pair(2, 1),
        std::pair(3, 1),
        std::pair(6, 1),
        std::pair(1, 2),
        std::pair(2, 2),
        std::pair(3, 2)
    ),
    [](const auto& each) {
      return "dp" + std::to_string(each.param.first) + "_tp" + std::to_string(each.param.second);
    }
);

TEST_P(VisionPlanTest, ConvolutionalNetworkRaisesNoAlarmAndHasTheWholesGradients) {
  const auto [dp, tp] = GetParam();
  testing::run_ranks(dp * tp, [dp = dp, tp = tp](const std::shared_ptr<comm::World>& world) {
    expect_validated_and_equal<Cnn>(world, dp, tp);
  });
}

TEST_P(VisionPlanTest, VisionTransformerRaisesNoAlarmAndHasTheWholesGradients) {
  const auto [dp, tp] = GetParam();
  testing::run_ranks(dp * tp, [dp = dp, tp = tp](const std::shared_ptr<comm::World>& world) {
    expect_validated_and_equal<Vit>(world, dp, tp);
  });
}

// That no alarm comes must not be for want of looking.
TEST(VisionPlanTeethTest, AConvolutionThatAddsUpCutChannelsUnreducedIsRefused) {
  testing::run_ranks(2, [](const std::shared_ptr<comm::World>& world) {
    const auto mesh = std::make_shared<const comm::ProcessMesh>(
        world, layout::DeviceMesh({{"dp", 1}, {"tp", 2}}, world->topology())
    );
    Cnn model;
    const at::Tensor x = at::ones({2, 3, kSize, kSize}, at::kDouble);
    const at::Tensor y = at::arange(2, at::kLong);
    const Layout whole = layout::replicated_layout(mesh->mesh());
    const plan::ShardingPlan right = CnnImpl::sharding_plan();
    plan::ShardingPlan forgetful;
    for (const plan::PlanRule& rule : right.rules()) {
      if (rule.kind != plan::RuleKind::kOutput) {
        forgetful.add(rule);
      }
    }
    try {
      (void)plan::apply_plan(
          *model,
          forgetful,
          mesh,
          {{x, {x.sizes().vec(), whole}, "images"}, {y, {y.sizes().vec(), whole}, "labels"}},
          [&] { return std::vector<at::Tensor>{model->forward(x, y)}; }
      );
      ADD_FAILURE() << "a missing reduction was let pass";
    } catch (const plan::LayoutError& error) {
      EXPECT_NE(std::string(error.what()).find("aten::cross_entropy_loss"), std::string::npos)
          << error.what();
      EXPECT_NE(std::string(error.what()).find("Partial(sum)"), std::string::npos) << error.what();
    }
  });
}

}  // namespace
}  // namespace hypershard
