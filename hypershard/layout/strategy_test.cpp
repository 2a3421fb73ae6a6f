// Tests the strategies against the published table, written out here once more.
// Also the rule that stated triples must keep, one error text a rule.
#include "hypershard/layout/strategy.h"

#include <gtest/gtest.h>

#include "hypershard/layout/thrown_text.h"

namespace hypershard::layout {
namespace {

using Names = std::vector<std::string>;

constexpr Strategy kAll[] = {
    Strategy::kDdp,
    Strategy::kZero1,
    Strategy::kZero2,
    Strategy::kZero3,
    Strategy::kHsdp,
    Strategy::kHierarchical,
};

DeviceMesh make_mesh(std::vector<MeshAxis> axes) {
  int size = 1;
  for (const MeshAxis& axis : axes) {
    size *= axis.size;
  }
  return DeviceMesh(std::move(axes), Topology::single_supernode(size));
}

struct ExpectedRow {
  Strategy strategy;
  const char* name;
  const char* runtime;
  const char* gradient;
  const char* update;
};

class StrategyTableTest : public testing::TestWithParam<ExpectedRow> {};

TEST_P(StrategyTableTest, IsTheRowOfTheDesign) {
  const ExpectedRow& row = GetParam();
  const DeviceMesh mesh = make_mesh({{"replicate", 2}, {"shard", 4}});
  const PlaneLayouts layouts =
      plane_layouts(row.strategy, mesh, find_data_axes(mesh, row.strategy));
  EXPECT_EQ(to_text(layouts.runtime, mesh), row.runtime);
  EXPECT_EQ(to_text(layouts.gradient, mesh), row.gradient);
  EXPECT_EQ(to_text(layouts.update, mesh), row.update);
}

TEST_P(StrategyTableTest, NameRoundTrips) {
  EXPECT_EQ(to_text(GetParam().strategy), GetParam().name);
  EXPECT_EQ(parse_strategy(GetParam().name), GetParam().strategy);
}

constexpr const char* kWholeWhole = "replicate: Replicate, shard: Replicate";
constexpr const char* kWholeFlat = "replicate: Replicate, shard: Flat";
constexpr const char* kFlatFlat = "replicate: Flat, shard: Flat";

INSTANTIATE_TEST_SUITE_P(
    Rows,
    StrategyTableTest,
    testing::Values(
        ExpectedRow{Strategy::kDdp, "ddp", kWholeWhole, kWholeWhole, kWholeWhole},
        ExpectedRow{Strategy::kZero1, "zero1", kWholeWhole, kWholeWhole, kFlatFlat},
        ExpectedRow{Strategy::kZero2, "zero2", kWholeWhole, kFlatFlat, kFlatFlat},
        ExpectedRow{Strategy::kZero3, "zero3", kFlatFlat, kFlatFlat, kFlatFlat},
        ExpectedRow{Strategy::kHsdp, "hsdp", kWholeFlat, kWholeFlat, kWholeFlat},
        ExpectedRow{Strategy::kHierarchical, "hierarchical", kWholeFlat, kFlatFlat, kFlatFlat}
    ),
    [](const testing::TestParamInfo<ExpectedRow>& tested) { return tested.param.name; }
);

TEST(StrategyTest, FsdpMeansZero3) {
  EXPECT_EQ(parse_strategy("fsdp"), Strategy::kZero3);
}

TEST(StrategyTest, RejectsUnknownNamesWithTheNearest) {
  HS_EXPECT_INVALID(
      parse_strategy("zero4"),
      "unknown strategy 'zero4'",
      "ddp, zero1, zero2, zero3, hsdp",
      "did you mean 'zero"
  );
  HS_EXPECT_INVALID(parse_strategy("hierarchial"), "did you mean 'hierarchical'?");
  HS_EXPECT_INVALID(parse_strategy("ZERO3"), "unknown strategy 'ZERO3'");
  HS_EXPECT_INVALID(parse_strategy(""), "unknown strategy ''");
}

TEST(StrategyTest, FindsDataAxesByName) {
  const DeviceMesh both = make_mesh({{"pp", 2}, {"replicate", 2}, {"shard", 2}, {"tp", 2}});
  for (const Strategy strategy : kAll) {
    EXPECT_EQ(find_data_axes(both, strategy).replicate, "replicate");
    EXPECT_EQ(find_data_axes(both, strategy).shard, "shard");
  }
  const DeviceMesh dp = make_mesh({{"dp", 2}, {"tp", 2}});
  EXPECT_EQ(find_data_axes(dp, Strategy::kZero3).replicate, "");
  EXPECT_EQ(find_data_axes(dp, Strategy::kZero3).shard, "dp");
  const DeviceMesh replicate = make_mesh({{"replicate", 2}});
  EXPECT_EQ(find_data_axes(replicate, Strategy::kDdp).replicate, "replicate");
  EXPECT_EQ(find_data_axes(replicate, Strategy::kDdp).shard, "");
}

TEST(StrategyTest, OneAxisOfDataIsEnoughExceptForTheTwoTierStrategies) {
  const DeviceMesh mesh = make_mesh({{"shard", 4}});
  for (const Strategy strategy : {Strategy::kDdp, Strategy::kZero1, Strategy::kZero2}) {
    const PlaneLayouts layouts = plane_layouts(strategy, mesh, find_data_axes(mesh, strategy));
    EXPECT_EQ(to_text(layouts.runtime, mesh), "shard: Replicate");
  }
  const PlaneLayouts zero3 = plane_layouts(Strategy::kZero3, mesh, {.shard = "shard"});
  EXPECT_EQ(to_text(zero3.runtime, mesh), "shard: Flat");
  for (const Strategy strategy : {Strategy::kHsdp, Strategy::kHierarchical}) {
    HS_EXPECT_INVALID(
        find_data_axes(mesh, strategy),
        to_text(strategy),
        "needs an axis 'replicate'",
        "mesh(shard=4)",
        "size 1",
        "zero3"
    );
    HS_EXPECT_INVALID(
        plane_layouts(strategy, mesh, {.shard = "shard"}), "needs an axis 'replicate'"
    );
    HS_EXPECT_INVALID(
        find_data_axes(make_mesh({{"replicate", 4}}), strategy), "needs an axis 'shard'", "ddp"
    );
  }
}

TEST(StrategyTest, AxesOfSizeOneAreEnoughForTheTwoTierStrategies) {
  const DeviceMesh mesh = make_mesh({{"replicate", 1}, {"shard", 4}});
  for (const Strategy strategy : {Strategy::kHsdp, Strategy::kHierarchical}) {
    const PlaneLayouts layouts = plane_layouts(strategy, mesh, find_data_axes(mesh, strategy));
    EXPECT_EQ(to_text(layouts.runtime, mesh), kWholeFlat);
  }
}

TEST(StrategyTest, OtherAxesAreReplicated) {
  const DeviceMesh mesh = make_mesh({{"tp", 2}, {"shard", 2}, {"ep", 2}, {"replicate", 2}});
  for (const Strategy strategy : kAll) {
    const PlaneLayouts layouts = plane_layouts(strategy, mesh, find_data_axes(mesh, strategy));
    for (const Layout& layout : {layouts.runtime, layouts.gradient, layouts.update}) {
      ASSERT_EQ(layout.placements.size(), 4U);
      EXPECT_EQ(layout.placements[0], Placement::replicate());
      EXPECT_EQ(layout.placements[2], Placement::replicate());
    }
  }
  const PlaneLayouts hierarchical =
      plane_layouts(Strategy::kHierarchical, mesh, find_data_axes(mesh, Strategy::kHierarchical));
  EXPECT_EQ(
      to_text(hierarchical.runtime, mesh),
      "tp: Replicate, shard: Flat, ep: Replicate, replicate: Replicate"
  );
  EXPECT_EQ(
      to_text(hierarchical.update, mesh),
      "tp: Replicate, shard: Flat, ep: Replicate, replicate: Flat"
  );
}

TEST(StrategyTest, DataAxesMayHaveOtherNamesIfStated) {
  const DeviceMesh mesh = make_mesh({{"outer", 2}, {"inner", 2}});
  const PlaneLayouts layouts =
      plane_layouts(Strategy::kHsdp, mesh, {.replicate = "outer", .shard = "inner"});
  EXPECT_EQ(to_text(layouts.update, mesh), "outer: Replicate, inner: Flat");
}

TEST(StrategyTest, RejectsMeshesWithoutUsableDataAxes) {
  HS_EXPECT_INVALID(
      find_data_axes(make_mesh({{"tp", 2}}), Strategy::kZero3), "finds no data axis", "mesh(tp=2)"
  );
  HS_EXPECT_INVALID(
      find_data_axes(make_mesh({{"dp", 2}, {"shard", 2}}), Strategy::kZero3),
      "both 'shard' and 'dp'"
  );
  const DeviceMesh mesh = make_mesh({{"shard", 2}});
  HS_EXPECT_INVALID(plane_layouts(Strategy::kDdp, mesh, {}), "finds no data axis");
  HS_EXPECT_INVALID(
      plane_layouts(Strategy::kDdp, mesh, {.replicate = "shard", .shard = "shard"}), "named both as"
  );
  HS_EXPECT_INVALID(
      plane_layouts(Strategy::kZero3, mesh, {.shard = "shar"}), "did you mean 'shard'?"
  );
}

TEST(StrategyTest, SplitAxesAreInTheOrderOfTheCuts) {
  // The mesh's own order must not matter.
  for (const DeviceMesh& mesh :
       {make_mesh({{"replicate", 2}, {"shard", 2}}), make_mesh({{"shard", 2}, {"replicate", 2}})}) {
    const DataAxes axes = find_data_axes(mesh, Strategy::kHierarchical);
    const PlaneLayouts layouts = plane_layouts(Strategy::kHierarchical, mesh, axes);
    EXPECT_EQ(split_axes(layouts.runtime, mesh, axes), (Names{"shard"}));
    EXPECT_EQ(split_axes(layouts.update, mesh, axes), (Names{"shard", "replicate"}));
    const PlaneLayouts ddp = plane_layouts(Strategy::kDdp, mesh, axes);
    EXPECT_EQ(split_axes(ddp.update, mesh, axes), Names{});
  }
}

TEST(StrategyTest, SplitAxesCountsOwnedAndShardButNoOtherAxis) {
  const DeviceMesh mesh = make_mesh({{"replicate", 2}, {"shard", 2}, {"tp", 2}});
  const DataAxes axes = {.replicate = "replicate", .shard = "shard"};
  const Layout owned = {{Placement::owned(), Placement::owned(), Placement::shard(0)}};
  EXPECT_EQ(split_axes(owned, mesh, axes), (Names{"shard", "replicate"}));
  const Layout partial = {{Placement::partial(), Placement::shard(1), Placement::replicate()}};
  EXPECT_EQ(split_axes(partial, mesh, axes), (Names{"shard"}));
  EXPECT_EQ(split_axes(owned, mesh, {.replicate = "", .shard = "shard"}), (Names{"shard"}));
  HS_EXPECT_INVALID(split_axes({}, mesh, axes), "0 placements", "has 3 axes");
}

TEST(CheckPlaneLayoutsTest, EveryStrategyPasses) {
  const DeviceMesh mesh = make_mesh({{"replicate", 2}, {"shard", 2}, {"tp", 2}});
  for (const Strategy strategy : kAll) {
    const DataAxes axes = find_data_axes(mesh, strategy);
    EXPECT_NO_THROW(check_plane_layouts(plane_layouts(strategy, mesh, axes), mesh, axes));
  }
}

class CheckStatedLayoutsTest : public testing::Test {
 protected:
  static Layout layout(Placement replicate, Placement shard, Placement tp = {}) {
    return {{replicate, shard, tp}};
  }
  void check() const { check_plane_layouts(layouts_, mesh_, axes_); }

  const Placement whole_ = Placement::replicate();
  const Placement flat_ = Placement::flat();
  const Placement owned_ = Placement::owned();
  const DeviceMesh mesh_ = make_mesh({{"replicate", 2}, {"shard", 2}, {"tp", 2}});
  const DataAxes axes_ = {.replicate = "replicate", .shard = "shard"};
  PlaneLayouts layouts_ = {layout(whole_, whole_), layout(whole_, whole_), layout(whole_, whole_)};
};

TEST_F(CheckStatedLayoutsTest, AcceptsOwnershipOverFlatRuntimeAndPartialGradientsOnTp) {
  layouts_.runtime = layout(whole_, flat_, Placement::shard(0));
  layouts_.gradient = layout(owned_, owned_, Placement::partial());
  layouts_.update = layout(owned_, owned_, Placement::shard(0));
  EXPECT_NO_THROW(check());
}

TEST_F(CheckStatedLayoutsTest, RejectsARuntimeSplitThatTheUpdateLacks) {
  layouts_.runtime = layout(whole_, flat_);
  HS_EXPECT_INVALID(check(), "axis 'shard'", "runtime layout (Flat)", "update layout (Replicate)");
}

TEST_F(CheckStatedLayoutsTest, RejectsAGradientSplitThatTheUpdateLacks) {
  layouts_.gradient = layout(flat_, flat_);
  layouts_.update = layout(whole_, flat_);
  HS_EXPECT_INVALID(check(), "axis 'replicate'", "gradient layout (Flat)", "never receives");
}

TEST_F(CheckStatedLayoutsTest, RejectsASplitOfAnotherAxisThatTheUpdateLacks) {
  layouts_.runtime = layout(whole_, whole_, Placement::shard(1));
  HS_EXPECT_INVALID(check(), "axis 'tp'", "runtime layout (Shard(1))");
}

TEST_F(CheckStatedLayoutsTest, RejectsCutsThatDoNotNest) {
  layouts_.update = layout(flat_, flat_);
  layouts_.gradient = layout(flat_, whole_);
  HS_EXPECT_INVALID(check(), "gradient layout", "cut first along 'shard'", "'replicate' only");
}

TEST_F(CheckStatedLayoutsTest, AcceptsAReplicateCutAloneIfNoPlaneCutsShard) {
  layouts_ = {layout(flat_, whole_), layout(flat_, whole_), layout(flat_, whole_)};
  EXPECT_NO_THROW(check());
}

TEST_F(CheckStatedLayoutsTest, RejectsValuesThatRestPartial) {
  layouts_.update = layout(whole_, whole_, Placement::partial());
  HS_EXPECT_INVALID(check(), "update layout is Partial(sum) on axis 'tp'");
  layouts_.update = layout(whole_, whole_);
  layouts_.runtime = layout(Placement::partial(Placement::Reduce::kAvg), whole_);
  HS_EXPECT_INVALID(check(), "runtime layout is Partial(avg) on axis 'replicate'");
  layouts_.runtime = layout(whole_, whole_);
  layouts_.gradient = layout(whole_, Placement::partial());
  HS_EXPECT_INVALID(check(), "gradient layout is Partial(sum) on axis 'shard'");
}

TEST_F(CheckStatedLayoutsTest, RejectsLayoutsOfAnotherMesh) {
  layouts_.gradient = {{whole_}};
  HS_EXPECT_INVALID(
      check(), "gradient layout has 1 placements", "has 3 axes", "shard: missing, tp: missing"
  );
}

}  // namespace
}  // namespace hypershard::layout
