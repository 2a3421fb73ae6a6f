// Tests which steps a redistribution takes and what they move: known pairs, nested cuts, tiers,
// every pair reachable, equal lists, and that big meshes are planned in milliseconds.
#include "hypershard/layout/redistribution.h"

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "hypershard/layout/sharding.h"
#include "hypershard/layout/thrown_text.h"

namespace hypershard::layout {
namespace {

using Shape = std::vector<std::int64_t>;
using Reduce = Placement::Reduce;
const Placement kWhole = Placement::replicate();
const Placement kRows = Placement::shard(0);
const Placement kColumns = Placement::shard(1);
const Placement kSum = Placement::partial();
const Placement kAvg = Placement::partial(Reduce::kAvg);
const Placement kMax = Placement::partial(Reduce::kMax);

DeviceMesh mesh_of(const std::vector<int>& sizes, int per_supernode = 0) {
  std::vector<MeshAxis> axes;
  int size = 1;
  for (const int axis_size : sizes) {
    axes.push_back({std::string(1, static_cast<char>('a' + axes.size())), axis_size});
    size *= axis_size;
  }
  std::vector<std::string> labels;
  for (int rank = 0; rank < size; ++rank) {
    labels.push_back(std::to_string(per_supernode == 0 ? 0 : rank / per_supernode));
  }
  return DeviceMesh(axes, Topology::from_labels(labels));
}

/// Writes the steps in short, e.g. `slice a, all_gather b`.
std::string steps_text(
    const Shape& shape, const Layout& from, const Layout& to, const DeviceMesh& mesh
) {
  std::string text;
  for (const RedistributionStep& step : plan_redistribution(shape, from, to, mesh)) {
    text += (text.empty() ? "" : ", ") + to_text(step.kind) + " ";
    for (const int axis : step.axes) {
      text += mesh.axes()[static_cast<std::size_t>(axis)].name;
    }
  }
  return text;
}

std::int64_t most_sent(
    const Shape& shape, const Layout& from, const Layout& to, const DeviceMesh& mesh
) {
  std::int64_t most = 0;
  for (int rank = 0; rank < mesh.size(); ++rank) {
    std::int64_t sent = 0;
    for (const RedistributionStep& step : plan_redistribution(shape, from, to, mesh)) {
      sent += step_traffic(step, shape, mesh, rank).sent;
    }
    most = std::max(most, sent);
  }
  return most;
}

TEST(RedistributionTest, OneAxisTakesOneStep) {
  const DeviceMesh mesh = mesh_of({4});
  const Shape shape = {8, 8};
  const auto text = [&](const Placement& from, const Placement& to) {
    return steps_text(shape, {{from}}, {{to}}, mesh);
  };
  EXPECT_EQ(text(kWhole, kWhole), "");
  EXPECT_EQ(text(kWhole, kRows), "slice a");
  EXPECT_EQ(text(kWhole, kSum), "mask a");
  EXPECT_EQ(text(kWhole, kAvg), "");
  EXPECT_EQ(text(kWhole, kMax), "");
  EXPECT_EQ(text(kRows, kWhole), "all_gather a");
  EXPECT_EQ(text(kRows, kColumns), "all_to_all a");
  EXPECT_EQ(text(kRows, kSum), "embed a");
  EXPECT_EQ(text(kRows, kMax), "embed a");
  EXPECT_EQ(text(kRows, kAvg), "embed a, scale a");
  EXPECT_EQ(text(kSum, kWhole), "all_reduce a");
  EXPECT_EQ(text(kSum, kColumns), "reduce_scatter a");
  EXPECT_EQ(text(kAvg, kRows), "reduce_scatter a");
  EXPECT_EQ(text(kSum, kAvg), "scale a");
  EXPECT_EQ(text(kAvg, kSum), "scale a");
  EXPECT_EQ(text(kSum, kMax), "reduce_scatter a, embed a");  // half of an all-reduce
}

TEST(RedistributionTest, ScalarsAreReducedTogether) {
  const DeviceMesh mesh = mesh_of({2, 3});
  EXPECT_EQ(steps_text({}, {{kSum, kSum}}, {{kWhole, kWhole}}, mesh), "all_reduce ab");
  EXPECT_EQ(steps_text({}, {{kWhole, kSum}}, {{kSum, kWhole}}, mesh), "mask a, all_reduce b");
}

TEST(RedistributionTest, AxesOfSizeOneAreNeverActedOn) {
  const DeviceMesh mesh = mesh_of({1, 4});
  EXPECT_EQ(steps_text({8}, {{kRows, kRows}}, {{kSum, kRows}}, mesh), "");
  EXPECT_EQ(steps_text({8}, {{kRows, kRows}, {1}}, {{kRows, kWhole}}, mesh), "all_gather b");
}

TEST(RedistributionTest, NestedCutsMoveNoMoreThanTheyMust) {
  const DeviceMesh mesh = mesh_of({2, 2});
  const Shape shape = {16};
  const Layout nested = {{kRows, kRows}};
  EXPECT_EQ(steps_text(shape, nested, {{kRows, kWhole}}, mesh), "all_gather b");
  EXPECT_EQ(steps_text(shape, nested, {{kWhole, kWhole}}, mesh), "all_gather ab");
  // Taking the outer cut away while the inner one stays: one exchange, half of the tensor; a gather
  // of all would be three quarters.
  EXPECT_EQ(steps_text(shape, nested, {{kWhole, kRows}}, mesh), "all_to_all ab");
  EXPECT_EQ(most_sent(shape, nested, {{kWhole, kRows}}, mesh), 8);
  // Another order of the cuts: each rank sends its quarter once.
  EXPECT_EQ(steps_text(shape, nested, {{kRows, kRows}, {1, 0}}, mesh), "all_to_all ab");
  EXPECT_EQ(most_sent(shape, nested, {{kRows, kRows}, {1, 0}}, mesh), 4);
  // An outer cut around an existing one: cut inside, then swap.
  EXPECT_EQ(steps_text(shape, {{kWhole, kRows}}, nested, mesh), "slice a, all_to_all ab");
  EXPECT_EQ(most_sent(shape, {{kWhole, kRows}}, nested, mesh), 4);
}

TEST(RedistributionTest, UnevenCutsAreCountedExactly) {
  const DeviceMesh mesh = mesh_of({3});
  const Shape shape = {5, 4};  // rows 2, 2, 1; columns 2, 1, 1
  const auto steps = plan_redistribution(shape, {{kRows}}, {{kColumns}}, mesh);
  ASSERT_EQ(steps.size(), 1U);
  EXPECT_EQ(step_traffic(steps[0], shape, mesh, 0), (Traffic{.sent = 4, .received = 6}));
  EXPECT_EQ(step_traffic(steps[0], shape, mesh, 2), (Traffic{.sent = 3, .received = 4}));
  const auto scatter = plan_redistribution(shape, {{kSum}}, {{kRows}}, mesh);
  EXPECT_EQ(step_traffic(scatter[0], shape, mesh, 2), (Traffic{.sent = 16, .received = 8}));
  const auto gather = plan_redistribution(shape, {{kRows}}, {{kWhole}}, mesh);
  EXPECT_EQ(step_traffic(gather[0], shape, mesh, 2), (Traffic{.sent = 8, .received = 16}));
}

TEST(RedistributionTest, TheBusiestRankMayBeAnyOne) {
  // Rows 2 2 2 1 1 1 1, columns 2 2 1 1 1 1 1: rank 2 has many rows and keeps few columns.
  const DeviceMesh mesh = mesh_of({7});
  EXPECT_EQ(most_sent({10, 9}, {{kRows}}, {{kColumns}}, mesh), 16);
  const auto step = plan_redistribution(Shape{10, 9}, {{kRows}}, {{kColumns}}, mesh)[0];
  EXPECT_EQ(step_traffic(step, Shape{10, 9}, mesh, 0).sent, 14);
}

TEST(RedistributionTest, SlowLinksCarryLess) {
  // Axis a crosses supernodes, axis b lies inside one.
  const DeviceMesh mesh = mesh_of({2, 4}, 4);
  const Shape shape = {64, 8};
  EXPECT_EQ(
      steps_text(shape, {{kSum, kSum}}, {{kWhole, kWhole}}, mesh),
      "reduce_scatter b, all_reduce a, all_gather b"
  );
  EXPECT_EQ(
      steps_text(shape, {{kRows, kWhole}}, {{kWhole, kWhole}}, mesh),
      "slice b, all_gather a, all_gather b"
  );
  const DeviceMesh flat = mesh_of({2, 4});
  EXPECT_EQ(steps_text(shape, {{kSum, kSum}}, {{kWhole, kWhole}}, flat), "all_reduce ab");
  EXPECT_EQ(steps_text(shape, {{kRows, kWhole}}, {{kWhole, kWhole}}, flat), "all_gather a");
}

TEST(RedistributionTest, ReductionsThatDoNotCommuteGoFromTheLastAxisToTheFirst) {
  const DeviceMesh mesh = mesh_of({2, 2});
  EXPECT_EQ(steps_text({}, {{kMax, kSum}}, {{kWhole, kWhole}}, mesh), "all_reduce b, all_reduce a");
  EXPECT_EQ(
      steps_text({8}, {{kMax, kSum}}, {{kWhole, kWhole}}, mesh),
      "reduce_scatter b, reduce_scatter a, all_gather ab"
  );
  // The maximum must be taken first although it shall stay: it is restored for nothing.
  EXPECT_EQ(steps_text({}, {{kSum, kMax}}, {{kWhole, kMax}}, mesh), "all_reduce b, all_reduce a");
  EXPECT_EQ(steps_text({8}, {{kMax, kSum}}, {{kMax, kWhole}}, mesh), "all_reduce b");
  // What is in the way may itself have something in the way.
  EXPECT_EQ(
      steps_text({}, {{kSum, kMax, kSum}}, {{kWhole, kMax, kSum}}, mesh_of({2, 2, 2})),
      "all_reduce c, all_reduce b, all_reduce a, mask c"
  );
}

std::vector<Placement> all_placements(const Shape& shape) {
  std::vector<Placement> all = {kWhole, kSum, kAvg, kMax, Placement::partial(Reduce::kMin)};
  for (int dim = 0; dim < static_cast<int>(shape.size()); ++dim) {
    all.push_back(Placement::shard(dim));
  }
  return all;
}

std::vector<Layout> all_layouts(const Shape& shape, int num_axes) {
  std::vector<Layout> layouts = {{}};
  for (int axis = 0; axis < num_axes; ++axis) {
    std::vector<Layout> longer;
    for (const Layout& layout : layouts) {
      for (const Placement& placement : all_placements(shape)) {
        longer.push_back(layout);
        longer.back().placements.push_back(placement);
      }
    }
    layouts = std::move(longer);
  }
  return layouts;
}

/// Expects that steps follow one another and end at the target.
void expect_chain(
    const Shape& shape, const Layout& from, const Layout& to, const DeviceMesh& mesh
) {
  const auto steps = plan_redistribution(shape, from, to, mesh);
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const std::string subject = to_text(from, mesh) + " -> " + to_text(to, mesh);
    for (int rank = 0; rank < mesh.size(); ++rank) {
      const Layout& next = i + 1 < steps.size() ? steps[i + 1].from : to;
      ASSERT_EQ(
          local_shape({shape, steps[i].to}, mesh, rank), local_shape({shape, next}, mesh, rank)
      ) << subject;
    }
    ASSERT_FALSE(steps[i].axes.empty()) << subject;
  }
  ASSERT_TRUE(
      !steps.empty() || local_shape({shape, from}, mesh, 0) == local_shape({shape, to}, mesh, 0)
  );
}

TEST(RedistributionTest, EveryPairIsReachable) {
  for (const auto& [mesh, shape] :
       {std::pair{mesh_of({3}), Shape{5, 2}},
        std::pair{mesh_of({2, 2}), Shape{5, 2}},
        std::pair{mesh_of({2, 3}, 3), Shape{7}},
        std::pair{mesh_of({2, 2, 2}), Shape{3}}}) {
    const auto layouts = all_layouts(shape, mesh.num_axes());
    for (const Layout& from : layouts) {
      for (const Layout& to : layouts) {
        expect_chain(shape, from, to, mesh);
      }
    }
  }
}

TEST(RedistributionTest, BigMeshesArePlannedInMilliseconds) {
  const DeviceMesh flat = mesh_of({4, 16, 4, 4});
  const DeviceMesh tiered = mesh_of({4, 16, 4, 4}, 16);
  const Shape shape = {64, 128, 32, 96};
  const Placement third = Placement::shard(2);
  const Placement fourth = Placement::shard(3);
  const std::vector<std::pair<Layout, Layout>> pairs = {
      {{{kRows, kRows, kColumns, third}}, {{kWhole, kWhole, kWhole, kWhole}}},
      {{{kRows, kRows, kColumns, third}}, {{third, kColumns, kRows, fourth}}},
      {{{kSum, kSum, kSum, kSum}}, {{kWhole, kWhole, kWhole, kWhole}}},
      {{{kSum, kRows, kSum, kColumns}}, {{kRows, kWhole, kColumns, fourth}}},
      {{{kRows, kRows, kRows, kRows}}, {{kRows, kRows, kRows, kRows}, {3, 2, 1, 0}}},
      {{{kSum, kMax, kSum, kAvg}}, {{kRows, kColumns, third, fourth}}},
  };
  for (const DeviceMesh& mesh : {flat, tiered}) {
    for (const auto& [from, to] : pairs) {
      const auto start = std::chrono::steady_clock::now();
      const auto steps = plan_redistribution(shape, from, to, mesh);
      const std::chrono::duration<double, std::milli> elapsed =
          std::chrono::steady_clock::now() - start;
      // Milliseconds on a quiet machine; the bound is for busy ones and sanitizers.
      EXPECT_LT(elapsed.count(), 1000) << to_text(from, mesh) << " -> " << to_text(to, mesh);
      EXPECT_FALSE(steps.empty());
    }
  }
}

TEST(RedistributionTest, PrintsStepsWithBytes) {
  const DeviceMesh mesh = mesh_of({2, 2});
  const Shape shape = {8, 4};
  const Layout from = {{kRows, kSum}};
  const Layout to = {{kRows, kColumns}};
  EXPECT_EQ(
      to_text(plan_redistribution(shape, from, to, mesh), shape, mesh, 0, 2),
      "reduce_scatter over b (Partial(sum) -> Shard(1)), sends 16 bytes, receives 16"
  );
  EXPECT_EQ(to_text(plan_redistribution(shape, to, to, mesh), shape, mesh, 0, 2), "nothing to do");
  EXPECT_EQ(
      to_text(
          plan_redistribution(shape, {{kRows, kRows}}, {{kRows, kRows}, {1, 0}}, mesh)[0], mesh
      ),
      "all_to_all over a+b (Shard(0), Shard(0) -> Shard(0), Shard(0) (dimension 0 cut by b, then "
      "a))"
  );
}

TEST(RedistributionTest, RefusesLayoutsThatDoNotFit) {
  const DeviceMesh mesh = mesh_of({2, 2});
  const Shape shape = {8};
  HS_EXPECT_INVALID(
      plan_redistribution(shape, {{kRows, kColumns}}, {{kRows, kRows}}, mesh), "'b'", "Shard(1)"
  );
  HS_EXPECT_INVALID(plan_redistribution(shape, {{kRows, kRows}}, {{kRows}}, mesh), "b: missing");
  HS_EXPECT_INVALID(
      plan_redistribution(shape, {{kRows, kRows}}, {{kRows, kWhole}}, mesh, {.slow_weight = 0}),
      "slow_weight"
  );
}

}  // namespace
}  // namespace hypershard::layout
