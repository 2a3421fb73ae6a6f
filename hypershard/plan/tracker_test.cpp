// Layouts that are carried along: table, views, in-place writes, modules, faults, backward.
#include "hypershard/plan/tracker.h"

#include <gtest/gtest.h>

#include <ATen/core/dispatch/Dispatcher.h>

#include "hypershard/plan/test_models.h"

namespace hypershard::plan {
namespace {

using layout::Layout;
using layout::Placement;
using layout::TensorSpec;
using test::thrown_by;

class Watcher final : public TrackerObserver {
 public:
  void before_operator(const SeenOperator& seen) override { forward.push_back(seen.name); }
  void before_backward_operator(
      const std::string& name, c10::ArrayRef<at::Tensor>, const std::string& origin, bool
  ) override {
    backward.push_back(name + " of " + origin);
  }
  void on_assumed(const at::Tensor&, const std::string& used_by) override {
    assumed.push_back(used_by);
  }
  std::vector<std::string> forward;
  std::vector<std::string> backward;
  std::vector<std::string> assumed;
};

// One planned rank of a mesh {tp: 2}.
class TrackerTest : public ::testing::Test {
 protected:
  static Layout on(const Placement& placement) { return Layout{{placement}}; }
  at::Tensor tracked(at::IntArrayRef local, at::IntArrayRef global, const Placement& placement) {
    at::Tensor tensor = at::ones(local, at::kDouble);
    tracker_.set_spec(tensor, {global.vec(), on(placement)}, "given");
    return tensor;
  }
  Placement of(const at::Tensor& tensor) {
    const auto spec = tracker_.spec_of(tensor);
    EXPECT_TRUE(spec.has_value());
    return spec.has_value() ? spec->layout.placements[0] : Placement::flat();
  }

  layout::DeviceMesh mesh_ = test::planned_mesh({{"tp", 2}});
  Watcher watcher_;
  LayoutTracker tracker_{mesh_, 0, watcher_};
  test::Net net_{8, 12};
};

TEST_F(TrackerTest, ResultsGetLayoutsAndGlobalShapes) {
  const TrackingGuard guard(tracker_, *net_);
  const auto x = tracked({4, 8}, {4, 8}, Placement::replicate());
  const auto up = tracked({6, 8}, {12, 8}, Placement::shard(0));
  const auto down = tracked({8, 6}, {8, 12}, Placement::shard(1));
  const auto hidden = at::linear(x, up).relu();
  EXPECT_EQ(tracker_.spec_of(hidden), (TensorSpec{{4, 12}, on(Placement::shard(1))}));
  const auto y = at::linear(hidden, down);
  EXPECT_EQ(tracker_.spec_of(y), (TensorSpec{{4, 8}, on(Placement::partial())}));
  EXPECT_EQ(
      watcher_.forward,
      (std::vector<std::string>{
          "aten::ones", "aten::ones", "aten::ones", "aten::linear", "aten::relu", "aten::linear"
      })
  );
}

TEST_F(TrackerTest, RefusalNamesModuleOperatorLayoutsAndFix) {
  const TrackingGuard guard(tracker_, *net_);
  const auto x = tracked({4, 8}, {4, 8}, Placement::partial());
  tracker_.enter_module("blocks.0", {});
  try {
    x.relu();
    FAIL() << "a nonlinear use of a partial tensor passed";
  } catch (const LayoutError& error) {
    EXPECT_EQ(error.fault().module, "blocks.0");
    EXPECT_EQ(error.fault().subject, "aten::relu");
    HS_EXPECT_HAS(error.what(), "aten::relu in blocks.0");
    HS_EXPECT_HAS(error.what(), "tp: Partial(sum)");
    HS_EXPECT_HAS(error.what(), "global [4, 8] local [4, 8]");
    EXPECT_FALSE(error.fault().fix.empty());
  }
}

TEST_F(TrackerTest, OperatorWithGlobalSizesOfTheModelIsCaught) {
  const TrackingGuard guard(tracker_, *net_);
  const auto q = tracked({2, 6}, {2, 12}, Placement::shard(1));
  const auto heads = q.view({2, -1, 3});
  EXPECT_EQ(tracker_.spec_of(heads), (TensorSpec{{2, 4, 3}, on(Placement::shard(1))}));
  // Four heads everywhere: of half the width on each rank, which is another computation.
  const std::string text = thrown_by([&] { q.view({2, 4, -1}); });
  HS_EXPECT_HAS(text, "aten::view");
}

TEST_F(TrackerTest, ViewsAndInPlaceWritesKeepTrack) {
  const TrackingGuard guard(tracker_, *net_);
  const auto x = tracked({4, 8}, {8, 8}, Placement::shard(0));
  auto row = x.t();
  EXPECT_EQ(of(row), Placement::shard(1));
  row.mul_(2.0);
  EXPECT_EQ(of(row), Placement::shard(1));
  EXPECT_EQ(of(x), Placement::shard(0));
  EXPECT_EQ(x.sum().item<double>(), 64.0);
}

TEST_F(TrackerTest, WriteThroughAViewShowsOnTheTape) {
  const TrackingGuard guard(tracker_, *net_);
  const auto x = tracked({4, 8}, {4, 8}, Placement::replicate());
  const int before = tracker_.value_of(x, "test");
  auto view = x.view({8, 4});
  view.add_(1.0);
  const int after = tracker_.value_of(x, "test");
  EXPECT_NE(after, before);
  const TapeOperator& alias = tracker_.tape().op(tracker_.tape().value(after).producer);
  EXPECT_EQ(alias.kind, TapeKind::kAlias);
  EXPECT_EQ(alias.operands, (std::vector<int>{before, tracker_.value_of(view, "test")}));
}

TEST_F(TrackerTest, LayoutsAreForgottenWithTheirTensors) {
  const TrackingGuard guard(tracker_, *net_);
  const auto x = tracked({4, 8}, {8, 8}, Placement::shard(0));
  for (int i = 0; i < 20000; ++i) {
    const auto y = x + 1.0;
    ASSERT_LT(tracker_.table_size(), 2000U);
    if (i % 100 == 0) {
      tracker_.begin_forward();
    }
  }
  tracker_.begin_forward();
  EXPECT_LE(tracker_.table_size(), 2U);
}

TEST_F(TrackerTest, UnknownTensorsCountAsReplicateAndAreReported) {
  const auto table = at::ones({8}, at::kDouble);
  const TrackingGuard guard(tracker_, *net_);
  const auto x = tracked({4, 8}, {4, 8}, Placement::partial());
  EXPECT_EQ(of(x * table), Placement::partial());
  EXPECT_EQ(watcher_.assumed, std::vector<std::string>{"aten::mul.Tensor"});
  EXPECT_EQ(of(table), Placement::replicate());
}

TEST_F(TrackerTest, WrongLocalShapeOfAGivenTensorIsCaught) {
  const TrackingGuard guard(tracker_, *net_);
  HS_EXPECT_HAS(
      thrown_by([&] { tracked({3, 8}, {8, 8}, Placement::shard(0)); }),
      "its part of the global tensor is [4, 8]"
  );
}

TEST_F(TrackerTest, BackwardOperatorsAreNamedByTheModuleOfTheirForward) {
  const TrackingGuard guard(tracker_, *net_);
  const auto x = tracked({4, 8}, {4, 8}, Placement::replicate());
  net_->forward(x).sum().backward();
  const auto has = [this](const std::string& entry) {
    return std::find(watcher_.backward.begin(), watcher_.backward.end(), entry) !=
           watcher_.backward.end();
  };
  EXPECT_TRUE(has("aten::gelu_backward of blocks.0.mlp"));
  EXPECT_TRUE(has("aten::gelu_backward of blocks.1.mlp"));
  EXPECT_TRUE(has("aten::mm of blocks.1.mlp.down") || has("aten::mm of head"))
      << concat_text(watcher_.backward);
  EXPECT_TRUE(net_->head->weight.grad().defined());
}

TEST_F(TrackerTest, ThrowInsideBackwardReachesTheCaller) {
  class Thrower final : public TrackerObserver {
    void before_backward_operator(
        const std::string&, c10::ArrayRef<at::Tensor>, const std::string& origin, bool
    ) override {
      HS_FAIL(InvalidArgument, "stopped in ", origin);
    }
  };
  Thrower thrower;
  LayoutTracker tracker(mesh_, 0, thrower);
  const TrackingGuard guard(tracker, *net_);
  const auto y = net_->forward(at::ones({4, 8}, at::kDouble)).sum();
  EXPECT_THROW(y.backward(), InvalidArgument);
}

TEST_F(TrackerTest, GuardLeavesNothingBehind) {
  { const TrackingGuard guard(tracker_, *net_); }
  EXPECT_EQ(current_tracker(), nullptr);
  EXPECT_FALSE(net_->head->has_forward_hooks());
  at::ones({2});
  EXPECT_TRUE(watcher_.forward.empty());
  const TrackingGuard guard(tracker_, *net_);
  HS_EXPECT_HAS(
      thrown_by([&] { const TrackingGuard second(tracker_, *net_); }), "a tracker already"
  );
  {
    const TrackingPause pause;
    at::ones({2});
  }
  EXPECT_TRUE(watcher_.forward.empty());
}

TEST_F(TrackerTest, KernelsThatAreNoOperatorsAreNoticed) {
  const TrackingGuard guard(tracker_, *net_);
  auto filled = at::empty({4}, at::kDouble);
  std::fill_n(filled.mutable_data_ptr<double>(), 4, 1.0);
  HS_EXPECT_HAS(thrown_by([&] { filled + 1.0; }), "memory that no operator wrote to");
  HS_EXPECT_HAS(thrown_by([&] { filled.view({2, 2}) + 1.0; }), "register_op_rule");
  auto written = at::empty({4}, at::kDouble);
  written.narrow(0, 0, 4).fill_(1.0);
  EXPECT_NO_THROW(written + 1.0);
  auto zeroed = at::empty({4}, at::kDouble);
  EXPECT_NO_THROW(zeroed.zero_() + 1.0);
}

TEST_F(TrackerTest, OperatorWithoutARuleIsNamedWithTheWayToRegisterOne) {
  const TrackingGuard guard(tracker_, *net_);
  const auto x = tracked({4, 4}, {8, 4}, Placement::shard(0));
  const std::string text = thrown_by([&] { at::linalg_slogdet(x); });
  HS_EXPECT_HAS(text, "linalg_slogdet");
  HS_EXPECT_HAS(text, "register_op_rule");
}

}  // namespace
}  // namespace hypershard::plan
