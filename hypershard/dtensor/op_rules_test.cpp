// What verdicts say: global shapes, refusals that name things, written tensors, cuts that align.
#include "hypershard/dtensor/op_rules.h"

#include <algorithm>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "hypershard/core/error.h"

namespace hypershard::dtensor {
namespace {

using layout::DeviceMesh;
using layout::Layout;
using layout::Placement;
using layout::TensorSpec;
using layout::Topology;
using Specs = std::vector<TensorSpec>;
using Stack = std::vector<c10::IValue>;
using Sizes = std::vector<std::int64_t>;

const Placement kReplicate = Placement::replicate();
const Placement kPartial = Placement::partial();

Placement shard(int dim) {
  return Placement::shard(dim);
}

DeviceMesh mesh_of(std::vector<layout::MeshAxis> axes) {
  int size = 1;
  for (const layout::MeshAxis& axis : axes) {
    size *= axis.size;
  }
  return DeviceMesh(std::move(axes), Topology::single_supernode(size));
}

DeviceMesh tp_mesh(int size = 2) {
  return mesh_of({{"tp", size}});
}

/// Fills the schema's further arguments with their defaults.
Verdict judge(
    const char* name, const char* overload, Stack stack, const Specs& specs, const DeviceMesh& mesh
) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  const auto& arguments = op.schema().arguments();
  for (std::size_t i = stack.size(); i < arguments.size(); ++i) {
    stack.push_back(arguments[i].default_value().value_or(c10::IValue()));
  }
  return propagate({op, stack, specs}, mesh);
}

at::Tensor local(const Sizes& sizes) {
  return at::empty(sizes, at::device(at::kMeta));
}

void expect_refused(const Verdict& verdict, const std::vector<std::string>& fragments) {
  ASSERT_TRUE(verdict.refusal.has_value());
  EXPECT_TRUE(verdict.outputs.empty());
  for (const std::string& fragment : fragments) {
    EXPECT_NE(
        (verdict.refusal->what + "\n" + verdict.refusal->fix).find(fragment), std::string::npos
    ) << fragment
      << "\nis not in: " << verdict.refusal->what << "\n"
      << verdict.refusal->fix;
  }
}

void expect_output(const Verdict& verdict, const TensorSpec& expected) {
  ASSERT_FALSE(verdict.refusal.has_value()) << verdict.refusal->what;
  ASSERT_FALSE(verdict.outputs.empty());
  EXPECT_EQ(verdict.outputs[0], expected) << text_of(verdict.outputs[0].shape);
}

TEST(OpRulesTest, RowParallelProductIsPartial) {
  const Specs specs = {{{6, 8}, {{shard(1)}}}, {{8, 4}, {{shard(0)}}}};
  expect_output(
      judge("aten::mm", "", {local({6, 4}), local({4, 4})}, specs, tp_mesh()),
      {{6, 4}, {{kPartial}}}
  );
}

TEST(OpRulesTest, ReplicatedInputBesideRowParallelWeightIsRefused) {
  const Specs specs = {{{6, 8}, {{kReplicate}}}, {{8, 4}, {{shard(0)}}}};
  expect_refused(
      judge("aten::mm", "", {local({6, 8}), local({4, 4})}, specs, tp_mesh()),
      {"aten::mm",
       "'mat2' [8, 4] is Shard(0)",
       "'self' [6, 8] is Replicate",
       "axis tp",
       "dimension 1 of 'self'",
       "redistribute 'self' to Shard(1)"}
  );
}

TEST(OpRulesTest, BiasOfARowParallelLayerIsRefused) {
  const Specs specs = {{{6, 8}, {{shard(1)}}}, {{4, 8}, {{shard(1)}}}, {{4}, {{kReplicate}}}};
  expect_refused(
      judge("aten::linear", "", {local({6, 4}), local({4, 4}), local({4})}, specs, tp_mesh()),
      {"'bias' [4] is Replicate", "once for each rank", "after the sum has been reduced"}
  );
}

TEST(OpRulesTest, BatchAndFeatureCutsComposeOnTwoAxes) {
  const DeviceMesh mesh = mesh_of({{"dp", 2}, {"tp", 2}});
  const Specs specs = {{{6, 8}, {{shard(0), kReplicate}}}, {{4, 8}, {{kReplicate, shard(0)}}}};
  expect_output(
      judge("aten::linear", "", {local({3, 8}), local({2, 8})}, specs, mesh),
      {{6, 4}, {{shard(0), shard(1)}}}
  );
}

TEST(OpRulesTest, PartialIsRefusedByWhatIsNotLinear) {
  for (const char* name :
       {"aten::gelu",
        "aten::relu",
        "aten::exp",
        "aten::square",
        "aten::silu",
        "aten::tanh",
        "aten::abs",
        "aten::sigmoid",
        "aten::rsqrt"}) {
    const Specs specs = {{{6, 8}, {{kPartial}}}};
    expect_refused(
        judge(name, "", {local({6, 8})}, specs, tp_mesh()),
        {name, "'self' [6, 8] is Partial(sum)", "axis tp", "boundary is missing"}
    );
  }
}

TEST(OpRulesTest, PartialIsAddedToPartialOnly) {
  const Stack stack = {local({6}), local({6})};
  expect_output(
      judge(
          "aten::add", "Tensor", stack, Specs{{{6}, {{kPartial}}}, {{6}, {{kPartial}}}}, tp_mesh()
      ),
      {{6}, {{kPartial}}}
  );
  expect_refused(
      judge(
          "aten::add", "Tensor", stack, Specs{{{6}, {{kPartial}}}, {{6}, {{kReplicate}}}}, tp_mesh()
      ),
      {"'other' [6] is Replicate", "counted once for each rank"}
  );
  expect_refused(
      judge(
          "aten::add", "Tensor", stack, Specs{{{6}, {{kPartial}}}, {{6}, {{shard(0)}}}}, tp_mesh()
      ),
      {"'other' [6] is Shard(0)", "'self' [6] is Partial(sum)"}
  );
  expect_refused(
      judge(
          "aten::mul", "Tensor", stack, Specs{{{6}, {{kPartial}}}, {{6}, {{kPartial}}}}, tp_mesh()
      ),
      {"product of sums"}
  );
}

TEST(OpRulesTest, PiecesThatFitByChanceAreRefused) {
  // Local shapes [1, 4] and [2, 4] broadcast; the global ones would not mean that.
  const Specs specs = {{{2, 4}, {{shard(0)}}}, {{2, 4}, {{kReplicate}}}};
  expect_refused(
      judge("aten::add", "Tensor", {local({1, 4}), local({2, 4})}, specs, tp_mesh()),
      {"'other' [2, 4] is Replicate", "dimension 0 of 'other'"}
  );
  const Specs different = {{{4}, {{shard(0)}}}, {{2}, {{kReplicate}}}};
  expect_refused(
      judge("aten::add", "Tensor", {local({2}), local({2})}, different, tp_mesh()),
      {"global shape [2]", "does not broadcast"}
  );
}

TEST(OpRulesTest, HeadsAreSplitFromACutDimension) {
  const Specs specs = {{{3, 5, 24}, {{shard(2)}}}};
  expect_output(
      judge("aten::view", "", {local({3, 5, 12}), Sizes{3, 5, -1, 6}}, specs, tp_mesh()),
      {{3, 5, 4, 6}, {{shard(2)}}}
  );
  // One head a rank.
  expect_output(
      judge("aten::view", "", {local({3, 5, 6}), Sizes{3, 5, 1, 6}}, specs, tp_mesh(4)),
      {{3, 5, 4, 6}, {{shard(2)}}}
  );
}

TEST(OpRulesTest, EveryRankComesToTheSameGlobalShape) {
  const Specs specs = {{{5, 4, 6}, {{shard(0)}}}};
  for (const std::int64_t rows : {2, 1, 1, 1}) {
    expect_output(
        judge("aten::view", "", {local({rows, 4, 6}), Sizes{rows, 24}}, specs, tp_mesh(4)),
        {{5, 24}, {{shard(0)}}}
    );
  }
  const Specs few = {{{2, 4, 6}, {{shard(0)}}}};
  for (const std::int64_t rows : {1, 1, 0, 0}) {
    expect_output(
        judge("aten::view", "", {local({rows, 4, 6}), Sizes{rows, 4, 2, 3}}, few, tp_mesh(4)),
        {{2, 4, 2, 3}, {{shard(0)}}}
    );
  }
}

TEST(OpRulesTest, PiecesThatDoNotHoldWholeBlocksAreRefused) {
  const Specs specs = {{{3, 4}, {{shard(0)}}}};
  expect_refused(
      judge("aten::flatten", "using_ints", {local({2, 4}), 0, -1}, specs, tp_mesh()),
      {"dimension 0 of 'self' [3, 4]", "whole blocks", "3 blocks"}
  );
  const Specs inner = {{{4, 6}, {{shard(1)}}}};
  expect_refused(
      judge("aten::view", "", {local({4, 3}), Sizes{12}}, inner, tp_mesh()),
      {"dimension 1 of 'self' [4, 6]", "interleave"}
  );
}

TEST(OpRulesTest, MeansNeedPiecesOfEqualSize) {
  expect_output(
      judge("aten::mean", "", {local({3}), c10::IValue()}, Specs{{{6}, {{shard(0)}}}}, tp_mesh()),
      {{}, {{Placement::partial(Placement::Reduce::kAvg)}}}
  );
  expect_refused(
      judge("aten::mean", "", {local({3}), c10::IValue()}, Specs{{{5}, {{shard(0)}}}}, tp_mesh()),
      {"unequal size", "the mean of their means"}
  );
}

TEST(OpRulesTest, WrittenTensorsKeepTheirLayout) {
  const Stack stack = {local({6}), local({6})};
  expect_output(
      judge(
          "aten::add_", "Tensor", stack, Specs{{{6}, {{shard(0)}}}, {{6}, {{shard(0)}}}}, tp_mesh()
      ),
      {{6}, {{shard(0)}}}
  );
  expect_refused(
      judge("aten::copy_", "", stack, Specs{{{6}, {{kReplicate}}}, {{6}, {{kPartial}}}}, tp_mesh()),
      {"aten::copy_", "'self' [6] (tp: Replicate) is written", "(tp: Partial(sum))"}
  );
}

TEST(OpRulesTest, OutVariantsFollowTheFunctionalRule) {
  const Stack stack = {local({6, 4}), local({4, 4}), local({6, 4})};
  const TensorSpec left = {{6, 8}, {{shard(1)}}};
  const TensorSpec right = {{8, 4}, {{shard(0)}}};
  expect_output(
      judge("aten::mm", "out", stack, Specs{left, right, {{6, 4}, {{kPartial}}}}, tp_mesh()),
      {{6, 4}, {{kPartial}}}
  );
  expect_refused(
      judge("aten::mm", "out", stack, Specs{left, right, {{6, 4}, {{kReplicate}}}}, tp_mesh()),
      {"'out' [6, 4] (tp: Replicate) is written"}
  );
}

TEST(OpRulesTest, AnAxisOfOneRankRefusesNothing) {
  expect_output(
      judge("aten::softmax", "int", {local({6}), 0}, Specs{{{6}, {{shard(0)}}}}, tp_mesh(1)),
      {{6}, {{kReplicate}}}
  );
}

TEST(OpRulesTest, OrderOfNestedCutsIsKept) {
  const DeviceMesh mesh = mesh_of({{"dp", 2}, {"tp", 2}});
  const Layout turned = {{shard(0), shard(0)}, {1, 0}};
  const Layout straight = {{shard(0), shard(0)}};
  expect_output(
      judge("aten::transpose", "int", {local({2, 3}), 0, 1}, Specs{{{8, 3}, turned}}, mesh),
      {{3, 8}, {{shard(1), shard(1)}, {1, 0}}}
  );
  expect_refused(
      judge(
          "aten::add",
          "Tensor",
          {local({2}), local({2})},
          Specs{{{8}, turned}, {{8}, straight}},
          mesh
      ),
      {"different orders of axes"}
  );
}

TEST(OpRulesTest, BatchNormOfACutBatchNeedsTheWholeBatchInTraining) {
  const Specs specs = {{{6, 4, 3, 3}, {{shard(0)}}}};
  const Stack stack = {
      local({3, 4, 3, 3}),
      at::Tensor(),
      at::Tensor(),
      at::Tensor(),
      at::Tensor(),
      true,
      0.1,
      1e-5,
      false
  };
  expect_refused(
      judge("aten::batch_norm", "", stack, specs, tp_mesh()), {"aten::batch_norm", "every entry"}
  );
}

TEST(OpRulesTest, UndefinedResultsHaveAnEmptySpec) {
  c10::List<bool> mask({true, false, false});
  const TensorSpec rows = {{6, 4}, {{shard(0)}}};
  const TensorSpec statistics = {{6, 1}, {{shard(0)}}};
  const Verdict verdict = judge(
      "aten::native_layer_norm_backward",
      "",
      {local({3, 4}),
       local({3, 4}),
       Sizes{4},
       local({3, 1}),
       local({3, 1}),
       local({4}),
       local({4}),
       mask},
      Specs{rows, rows, statistics, statistics, {{4}, {{kReplicate}}}, {{4}, {{kReplicate}}}},
      tp_mesh()
  );
  expect_output(verdict, rows);
  ASSERT_EQ(verdict.outputs.size(), 3U);
  EXPECT_EQ(verdict.outputs[1], TensorSpec{});
  EXPECT_EQ(verdict.outputs[2], TensorSpec{});
}

TEST(OpRulesTest, NormWeightsHavePartialGradients) {
  c10::List<bool> mask({true, true, true});
  const TensorSpec rows = {{6, 4}, {{shard(0)}}};
  const TensorSpec statistics = {{6, 1}, {{shard(0)}}};
  const Verdict verdict = judge(
      "aten::native_layer_norm_backward",
      "",
      {local({3, 4}),
       local({3, 4}),
       Sizes{4},
       local({3, 1}),
       local({3, 1}),
       local({4}),
       local({4}),
       mask},
      Specs{rows, rows, statistics, statistics, {{4}, {{kReplicate}}}, {{4}, {{kReplicate}}}},
      tp_mesh()
  );
  ASSERT_EQ(verdict.outputs.size(), 3U);
  EXPECT_EQ(verdict.outputs[1], (TensorSpec{{4}, {{kPartial}}}));
  EXPECT_EQ(verdict.outputs[2], (TensorSpec{{4}, {{kPartial}}}));
}

TEST(OpRulesTest, RandomOperatorsSayThatTheyAre) {
  const Specs specs = {{{6}, {{shard(0)}}}};
  EXPECT_TRUE(judge("aten::dropout", "", {local({3}), 0.5, true}, specs, tp_mesh()).is_random);
  EXPECT_FALSE(judge("aten::dropout", "", {local({3}), 0.5, false}, specs, tp_mesh()).is_random);
  EXPECT_TRUE(judge("aten::rand_like", "", {local({3})}, specs, tp_mesh()).is_random);
  EXPECT_FALSE(judge("aten::relu", "", {local({3})}, specs, tp_mesh()).is_random);
}

TEST(OpRulesTest, FactoriesAreReplicateOfTheirLocalSize) {
  expect_output(
      judge("aten::zeros", "", {Sizes{3, 4}}, Specs{}, tp_mesh()), {{3, 4}, {{kReplicate}}}
  );
  expect_output(judge("aten::arange", "start", {2, 7}, Specs{}, tp_mesh()), {{5}, {{kReplicate}}});
  expect_output(
      judge("aten::ones_like", "", {local({3})}, Specs{{{6}, {{shard(0)}}}}, tp_mesh()),
      {{6}, {{shard(0)}}}
  );
}

TEST(OpRulesTest, SpecsThatDoNotFitTheCallAreTheCallersMistake) {
  EXPECT_THROW(judge("aten::relu", "", {local({3})}, Specs{}, tp_mesh()), InvalidArgument);
  EXPECT_THROW(
      judge("aten::relu", "", {local({3})}, Specs{{{6, 1}, {{shard(0)}}}}, tp_mesh()),
      InvalidArgument
  );
  EXPECT_THROW(
      judge("aten::relu", "", {local({3})}, Specs{{{6}, {{shard(1)}}}}, tp_mesh()), InvalidArgument
  );
}

}  // namespace
}  // namespace hypershard::dtensor
