// Tests what placements mean to the engine (splits or not) and how they print.
// Messages and plans quote these texts.
#include "hypershard/layout/placement.h"

#include <gtest/gtest.h>

namespace hypershard::layout {
namespace {

TEST(PlacementTest, DefaultIsReplicate) {
  EXPECT_EQ(Placement{}, Placement::replicate());
  EXPECT_EQ(Placement{}.kind, Placement::Kind::kReplicate);
}

TEST(PlacementTest, OnlyShardFlatAndOwnedSplit) {
  EXPECT_TRUE(Placement::shard(0).splits());
  EXPECT_TRUE(Placement::flat().splits());
  EXPECT_TRUE(Placement::owned().splits());
  EXPECT_FALSE(Placement::replicate().splits());
  EXPECT_FALSE(Placement::partial().splits());
}

TEST(PlacementTest, EqualityTellsDimensionsAndReductionsApart) {
  EXPECT_EQ(Placement::shard(1), Placement::shard(1));
  EXPECT_NE(Placement::shard(1), Placement::shard(0));
  EXPECT_EQ(Placement::partial(), Placement::partial(Placement::Reduce::kSum));
  EXPECT_NE(Placement::partial(), Placement::partial(Placement::Reduce::kMax));
  EXPECT_NE(Placement::flat(), Placement::owned());
}

TEST(PlacementTest, PrintsEveryPlacement) {
  EXPECT_EQ(to_text(Placement::replicate()), "Replicate");
  EXPECT_EQ(to_text(Placement::shard(2)), "Shard(2)");
  EXPECT_EQ(to_text(Placement::flat()), "Flat");
  EXPECT_EQ(to_text(Placement::owned()), "Owned");
  EXPECT_EQ(to_text(Placement::partial()), "Partial(sum)");
  EXPECT_EQ(to_text(Placement::partial(Placement::Reduce::kAvg)), "Partial(avg)");
  EXPECT_EQ(to_text(Placement::partial(Placement::Reduce::kMax)), "Partial(max)");
  EXPECT_EQ(to_text(Placement::partial(Placement::Reduce::kMin)), "Partial(min)");
}

TEST(LayoutTest, PrintsOnePlacementAnAxis) {
  const DeviceMesh mesh({{"replicate", 2}, {"shard", 2}}, Topology::single_supernode(4));
  const Layout layout = {{Placement::replicate(), Placement::flat()}};
  EXPECT_EQ(to_text(layout, mesh), "replicate: Replicate, shard: Flat");
}

TEST(LayoutTest, PrintsALayoutThatDoesNotFitTheMesh) {
  const DeviceMesh mesh({{"shard", 2}}, Topology::single_supernode(2));
  EXPECT_EQ(to_text(Layout{}, mesh), "shard: missing");
  const Layout longer = {{Placement::flat(), Placement::owned()}};
  EXPECT_EQ(to_text(longer, mesh), "shard: Flat, axis 1 (not in the mesh): Owned");
}

TEST(LayoutTest, NestedCutsFollowTheMeshUnlessStated) {
  const auto rows = Placement::shard(0);
  EXPECT_EQ((Layout{{rows, rows}}.cut_axes(0)), (std::vector<int>{0, 1}));
  EXPECT_EQ((Layout{{rows, rows}, {1}}.cut_axes(0)), (std::vector<int>{1, 0}));
  EXPECT_EQ(
      (Layout{{rows, Placement::shard(1), rows}, {2, 0}}.cut_axes(0)), (std::vector<int>{2, 0})
  );
  EXPECT_TRUE((Layout{{rows, rows}}.cut_axes(1)).empty());
}

TEST(LayoutTest, EqualityIsAboutTheCutsNotAboutHowTheOrderIsStated) {
  const auto rows = Placement::shard(0);
  EXPECT_EQ((Layout{{rows, rows}}), (Layout{{rows, rows}, {0, 1}}));
  EXPECT_EQ((Layout{{rows, rows}, {1}}), (Layout{{rows, rows}, {1, 0}}));
  EXPECT_NE((Layout{{rows, rows}}), (Layout{{rows, rows}, {1, 0}}));
  // Different dimensions: the order of the axes says nothing.
  EXPECT_EQ((Layout{{rows, Placement::shard(1)}}), (Layout{{rows, Placement::shard(1)}, {1, 0}}));
}

TEST(LayoutTest, GradientsOfPartialTensorsAreReplicate) {
  const auto rows = Placement::shard(0);
  EXPECT_EQ(
      gradient_layout({{rows, Placement::partial(), rows, Placement::replicate()}, {2}}),
      (Layout{{rows, Placement::replicate(), rows, Placement::replicate()}, {2}})
  );
}

TEST(LayoutTest, PrintsNestedCutsThatAreOutOfMeshOrder) {
  const DeviceMesh mesh({{"dp", 2}, {"tp", 2}}, Topology::single_supernode(4));
  const auto rows = Placement::shard(0);
  EXPECT_EQ(to_text(Layout{{rows, rows}}, mesh), "dp: Shard(0), tp: Shard(0)");
  EXPECT_EQ(
      to_text(Layout{{rows, rows}, {1}}, mesh),
      "dp: Shard(0), tp: Shard(0) (dimension 0 cut by tp, then dp)"
  );
}

}  // namespace
}  // namespace hypershard::layout
