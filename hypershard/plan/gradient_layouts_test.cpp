// The gradient law on hand-made tapes.
#include "hypershard/plan/gradient_layouts.h"

#include <gtest/gtest.h>

#include "hypershard/core/error.h"
#include "hypershard/plan/test_models.h"

namespace hypershard::plan {
namespace {

using layout::Placement;

const Placement kRep = Placement::replicate();
const Placement kSum = Placement::partial();

// A tape on a mesh {tp: 2}, values by placement.
class GradientLayoutsTest : public ::testing::Test {
 protected:
  static layout::TensorSpec spec(const Placement& placement) {
    return {{4, 4}, layout::Layout{{placement}}};
  }
  int given(const Placement& placement) { return tape_.add_given(spec(placement), true); }
  int op(std::vector<int> operands, const Placement& output) {
    TapeOperator made{.name = "op" + std::to_string(tape_.ops().size())};
    made.operands = std::move(operands);
    const int index = tape_.add_operator(std::move(made), {{spec(output), -1, true, {}}});
    return tape_.op(index).outputs.front();
  }
  int boundary(int source, const Placement& output, bool is_named = true) {
    TapeOperator made{.kind = TapeKind::kBoundary, .name = "boundary"};
    made.operands = {source};
    made.is_named = {is_named ? std::uint8_t{1} : std::uint8_t{0}};
    const int index = tape_.add_operator(std::move(made), {{spec(output), -1, true, {}}});
    return tape_.op(index).outputs.front();
  }
  GradientLayouts derive(int seed) const {
    return derive_gradients(tape_, std::vector<int>{seed}, mesh_);
  }
  static Placement of(const GradientLayouts& gradients, int value) {
    const auto& layout = gradients.of_value.at(static_cast<std::size_t>(value));
    EXPECT_TRUE(layout.has_value()) << "value " << value << " has no gradient";
    return layout.has_value() ? layout->placements.at(0) : Placement::flat();
  }

  Tape tape_;
  layout::DeviceMesh mesh_ = test::planned_mesh({{"tp", 2}});
};

TEST_F(GradientLayoutsTest, ColumnThenRowParallel) {
  const int x = given(kRep);
  const int up = given(Placement::shard(0));
  const int down = given(Placement::shard(1));
  const int norm = given(kRep);
  const int x_in = boundary(op({x, norm}, kRep), kRep);
  const int hidden = op({x_in, up}, Placement::shard(1));
  const int terms = op({hidden, down}, kSum);
  const int y = boundary(terms, kRep);
  const auto gradients = derive(op({x, y}, kRep));
  EXPECT_EQ(of(gradients, x_in), kSum);  // the boundary reduces it in backward
  EXPECT_EQ(of(gradients, x), kRep);
  EXPECT_EQ(of(gradients, norm), kRep);
  EXPECT_EQ(of(gradients, up), Placement::shard(0));
  EXPECT_EQ(of(gradients, down), Placement::shard(1));
  EXPECT_EQ(of(gradients, terms), kRep);
  EXPECT_TRUE(gradients.conflicts.empty());
  ASSERT_EQ(gradients.boundaries.size(), 2U);
  EXPECT_EQ(gradients.boundaries[1].arriving.placements[0], kSum);
  EXPECT_EQ(gradients.boundaries[1].leaving.placements[0], kRep);
}

TEST_F(GradientLayoutsTest, NormWeightUnderSequenceParallelIsPartial) {
  const int x = given(Placement::shard(1));
  const int weight = given(kRep);
  const auto gradients = derive(boundary(op({x, weight}, Placement::shard(1)), kRep));
  EXPECT_EQ(of(gradients, weight), kSum);
  EXPECT_EQ(of(gradients, x), Placement::shard(1));
}

TEST_F(GradientLayoutsTest, ForgottenInputBoundaryIsAConflictThatNamesBothUses) {
  const int x = given(kRep);
  const int up = given(Placement::shard(0));
  const int down = given(Placement::shard(1));
  const int hidden = op({x, up}, Placement::shard(1));  // op0
  const int y = boundary(op({hidden, down}, kSum), kRep);
  const auto gradients = derive(op({x, y}, kRep));  // op3
  ASSERT_EQ(gradients.conflicts.size(), 1U);
  EXPECT_EQ(gradients.conflicts[0].value, x);
  EXPECT_EQ(gradients.conflicts[0].partial_use, 0);
  EXPECT_EQ(gradients.conflicts[0].replicate_use, 3);
  EXPECT_EQ(gradients.conflicts[0].partial_origin, 0);
}

TEST_F(GradientLayoutsTest, APartialGradientIsFollowedToWhereItArose) {
  const int x = given(kRep);
  const int normed = op({op({x}, kRep)}, kRep);                                      // op0, op1
  const int hidden = op({normed, given(Placement::shard(0))}, Placement::shard(1));  // op2
  const int y = boundary(op({hidden, given(Placement::shard(1))}, kSum), kRep);
  const auto gradients = derive(op({x, y}, kRep));
  ASSERT_EQ(gradients.conflicts.size(), 1U);
  EXPECT_EQ(gradients.conflicts[0].partial_use, 0);
  EXPECT_EQ(gradients.conflicts[0].partial_origin, 2);
}

TEST_F(GradientLayoutsTest, ResultsOfOneOperatorMustAgreeToo) {
  const int x = given(kRep);
  TapeOperator split{.name = "split"};
  split.operands = {x};
  const int index = tape_.add_operator(
      std::move(split), {{spec(kRep), -1, true, {}}, {spec(kRep), -1, true, {}}}
  );
  const int a = tape_.op(index).outputs[0];
  const int b = tape_.op(index).outputs[1];
  const int weight = given(Placement::shard(0));
  const int y = boundary(op({a, weight}, Placement::shard(1)), kRep);
  EXPECT_TRUE(derive(y).conflicts.empty());  // b is not used: its gradient is zero
  const auto gradients = derive(op({y, b}, kRep));
  ASSERT_EQ(gradients.conflicts.size(), 1U);
  EXPECT_EQ(gradients.conflicts[0].partial_use, 1);
  EXPECT_EQ(gradients.conflicts[0].replicate_use, 3);
}

TEST_F(GradientLayoutsTest, BoundaryHandsOnWhatThePlanDoesNotName) {
  const int x = given(kRep);
  const int weight = given(Placement::shard(0));
  const int passed = boundary(x, kRep, /*is_named=*/false);
  const auto gradients = derive(boundary(op({passed, weight}, Placement::shard(1)), kRep));
  EXPECT_EQ(of(gradients, x), kSum);
}

TEST_F(GradientLayoutsTest, ConstantsAndUnreachedValuesHaveNone) {
  const int x = given(kRep);
  const int aside = op({x}, kRep);
  const int mask = tape_.add_given(spec(kRep), false);
  const auto gradients = derive(op({x, mask}, kRep));
  EXPECT_FALSE(gradients.of_value[static_cast<std::size_t>(aside)].has_value());
  EXPECT_FALSE(gradients.of_value[static_cast<std::size_t>(mask)].has_value());
  EXPECT_THROW(derive(99), InternalError);
}

TEST_F(GradientLayoutsTest, AxesOfOneRankNeverConflict) {
  mesh_ = test::planned_mesh({{"tp", 1}});
  const int x = given(kRep);
  const int weight = given(Placement::shard(0));
  const int y = boundary(op({x, weight}, Placement::shard(1)), kRep);
  EXPECT_TRUE(derive(op({x, y}, kRep)).conflicts.empty());
}

}  // namespace
}  // namespace hypershard::plan
