// Tests the arithmetic of cuts: pieces tile the tensor on every mesh, nested cuts in any order, and
// the messages of layouts that cannot describe a tensor.
#include "hypershard/layout/sharding.h"

#include <numeric>

#include <gtest/gtest.h>

#include "hypershard/layout/thrown_text.h"

namespace hypershard::layout {
namespace {

using Shape = std::vector<std::int64_t>;

DeviceMesh mesh_of(std::vector<MeshAxis> axes) {
  int size = 1;
  for (const MeshAxis& axis : axes) {
    size *= axis.size;
  }
  return DeviceMesh(std::move(axes), Topology::single_supernode(size));
}

const Placement kRows = Placement::shard(0);
const Placement kColumns = Placement::shard(1);

TEST(ShardingTest, TheFirstPiecesAreLonger) {
  EXPECT_EQ(cut_piece(7, 3, 0), (Range{0, 3}));
  EXPECT_EQ(cut_piece(7, 3, 1), (Range{3, 5}));
  EXPECT_EQ(cut_piece(7, 3, 2), (Range{5, 7}));
  EXPECT_EQ(cut_piece(1, 3, 0), (Range{0, 1}));
  EXPECT_EQ(cut_piece(1, 3, 2), (Range{1, 1}));
  EXPECT_EQ(cut_piece(0, 2, 1), (Range{0, 0}));
}

TEST(ShardingTest, LocalShapeOfEachPlacement) {
  const DeviceMesh mesh = mesh_of({{"dp", 2}, {"tp", 3}});
  const TensorSpec spec{{5, 7}, {{kRows, kColumns}}};
  EXPECT_EQ(local_shape(spec, mesh, 0), (Shape{3, 3}));
  EXPECT_EQ(local_shape(spec, mesh, 5), (Shape{2, 2}));
  EXPECT_EQ(local_offset(spec, mesh, 5), (Shape{3, 5}));
  const TensorSpec partial{{5, 7}, {{Placement::partial(), Placement::replicate()}}};
  EXPECT_EQ(local_shape(partial, mesh, 4), (Shape{5, 7}));
  const TensorSpec scalar{{}, {{Placement::partial(), Placement::replicate()}}};
  EXPECT_EQ(local_shape(scalar, mesh, 4), Shape{});
}

TEST(ShardingTest, NestedCutsGoFromTheOuterAxisToTheInnerOne) {
  const DeviceMesh mesh = mesh_of({{"a", 2}, {"b", 2}});
  const TensorSpec spec{{7}, {{kRows, kRows}}};  // 4+3 by a, then 2+2 and 2+1 by b
  EXPECT_EQ(local_offset(spec, mesh, 1), Shape{2});
  EXPECT_EQ(local_offset(spec, mesh, 2), Shape{4});
  EXPECT_EQ(local_shape(spec, mesh, 3), Shape{1});
  const TensorSpec other{{7}, {{kRows, kRows}, {1, 0}}};  // 4+3 by b, then by a
  EXPECT_EQ(local_offset(other, mesh, 1), Shape{4});
  EXPECT_EQ(local_offset(other, mesh, 2), Shape{2});
}

TEST(ShardingTest, RangesAlongAnAxisKeepTheOtherCoordinates) {
  const DeviceMesh mesh = mesh_of({{"a", 2}, {"b", 3}});
  const TensorSpec spec{{7}, {{kRows, kRows}}};
  EXPECT_EQ(ranges_along(spec, mesh, 4, 1, 0), (std::vector<Range>{{4, 5}, {5, 6}, {6, 7}}));
  EXPECT_EQ(ranges_along(spec, mesh, 4, 0, 0), (std::vector<Range>{{2, 3}, {5, 6}}));
}

/// Counts how many ranks hold each element: equal to the number of copies if the pieces tile.
void expect_tiles(const TensorSpec& spec, const DeviceMesh& mesh, int copies) {
  const std::int64_t rows = spec.shape[0];
  const std::int64_t columns = spec.shape[1];
  std::vector<int> held(static_cast<std::size_t>(rows * columns), 0);
  for (int rank = 0; rank < mesh.size(); ++rank) {
    const std::vector<Range> ranges = local_ranges(spec, mesh, mesh.coordinates(rank));
    for (std::int64_t i = ranges[0].begin; i < ranges[0].end; ++i) {
      for (std::int64_t j = ranges[1].begin; j < ranges[1].end; ++j) {
        ++held[static_cast<std::size_t>(i * columns + j)];
      }
    }
  }
  for (const int count : held) {
    ASSERT_EQ(count, copies) << to_text(spec.layout, mesh);
  }
}

TEST(ShardingTest, PiecesTileEverySizeOnEveryMeshInEveryOrder) {
  for (const DeviceMesh& mesh :
       {mesh_of({{"a", 2}, {"b", 2}}),
        mesh_of({{"a", 3}, {"b", 1}}),
        mesh_of({{"a", 1}, {"b", 4}}),
        mesh_of({{"a", 2}, {"b", 3}})}) {
    for (std::int64_t size = 0; size <= 17; ++size) {
      for (const std::vector<int>& order : {std::vector<int>{}, std::vector<int>{1, 0}}) {
        expect_tiles({{size, 3}, {{kRows, kRows}, order}}, mesh, 1);
        expect_tiles({{size, 3}, {{kRows, kColumns}, order}}, mesh, 1);
        expect_tiles(
            {{size, 3}, {{kRows, Placement::replicate()}, order}}, mesh, mesh.axes()[1].size
        );
      }
    }
  }
}

TEST(ShardingTest, AcceptsAllThatDescribesATensor) {
  const DeviceMesh mesh = mesh_of({{"a", 2}, {"b", 2}});
  EXPECT_NO_THROW(check_spec({{4, 0}, {{kRows, kColumns}}}, mesh));
  EXPECT_NO_THROW(
      check_spec({{}, {{Placement::partial(Placement::Reduce::kAvg), Placement::partial()}}}, mesh)
  );
  EXPECT_EQ(to_text(replicated_layout(mesh), mesh), "a: Replicate, b: Replicate");
}

TEST(ShardingTest, NamesWhatIsWrongWithALayout) {
  const DeviceMesh mesh = mesh_of({{"dp", 2}, {"tp", 2}});
  HS_EXPECT_INVALID(check_spec({{4}, {{kRows}}}, mesh), "one placement", "tp: missing");
  HS_EXPECT_INVALID(
      check_spec({{4}, {{kRows, kColumns}}}, mesh), "'tp'", "Shard(1)", "[4]", "0 to 0"
  );
  HS_EXPECT_INVALID(
      check_spec({{4, 4}, {{Placement::shard(-1), kRows}}}, mesh), "Shard(-1)", "hint", "Shard(1)"
  );
  HS_EXPECT_INVALID(check_spec({{}, {{kRows, kRows}}}, mesh), "without dimensions", "'dp'");
  HS_EXPECT_INVALID(
      check_spec({{4}, {{Placement::flat(), kRows}}}, mesh), "'dp' is Flat", "Replicate"
  );
  HS_EXPECT_INVALID(check_spec({{4}, {{kRows, Placement::owned()}}}, mesh), "'tp' is Owned");
  HS_EXPECT_INVALID(check_spec({{-2}, {{kRows, kRows}}}, mesh), "negative size -2");
  HS_EXPECT_INVALID(check_spec({{4}, {{kRows, kRows}, {1, 1}}}, mesh), "[1, 1]", "at most once");
  HS_EXPECT_INVALID(check_spec({{4}, {{kRows, kRows}, {2}}}, mesh), "0 to 1", "has 2");
  HS_EXPECT_INVALID(local_shape({{4}, {{kRows, kRows}}}, mesh, 4), "rank 4");
  HS_EXPECT_INVALID(cut_piece(4, 2, 2), "no piece 2 of 2");
  HS_EXPECT_INVALID(ranges_along({{4}, {{kRows, kRows}}}, mesh, 0, 2, 0), "no axis 2");
}

}  // namespace
}  // namespace hypershard::layout
