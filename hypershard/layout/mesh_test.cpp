// Tests the coordinate arithmetic of meshes: written-out small ones, and properties of many.
// Above all: groups along any axes partition the ranks, in an order all members agree on.
#include "hypershard/layout/mesh.h"

#include <algorithm>
#include <map>
#include <set>

#include <gtest/gtest.h>

#include "hypershard/layout/thrown_text.h"

namespace hypershard::layout {
namespace {

using Names = std::vector<std::string>;

DeviceMesh flat_mesh(std::vector<MeshAxis> axes) {
  int size = 1;
  for (const MeshAxis& axis : axes) {
    size *= axis.size;
  }
  return DeviceMesh(std::move(axes), Topology::single_supernode(size));
}

DeviceMesh two_hosts(std::vector<MeshAxis> axes, const std::vector<std::string>& labels) {
  return DeviceMesh(std::move(axes), Topology::from_labels(labels));
}

TEST(DeviceMeshTest, LastAxisVariesFastest) {
  const DeviceMesh mesh = flat_mesh({{"replicate", 2}, {"shard", 3}, {"tp", 4}});
  EXPECT_EQ(mesh.size(), 24);
  EXPECT_EQ(mesh.num_axes(), 3);
  for (int rank = 0; rank < 24; ++rank) {
    EXPECT_EQ(mesh.coordinate(rank, "replicate"), rank / 12);
    EXPECT_EQ(mesh.coordinate(rank, "shard"), rank / 4 % 3);
    EXPECT_EQ(mesh.coordinate(rank, "tp"), rank % 4);
  }
}

TEST(DeviceMeshTest, FindsAxesByName) {
  const DeviceMesh mesh = flat_mesh({{"replicate", 2}, {"shard", 3}});
  EXPECT_TRUE(mesh.has_axis("shard"));
  EXPECT_FALSE(mesh.has_axis("shar"));
  EXPECT_FALSE(mesh.has_axis(""));
  EXPECT_EQ(mesh.axis_index("replicate"), 0);
  EXPECT_EQ(mesh.axis_index("shard"), 1);
  EXPECT_EQ(mesh.axis_size("shard"), 3);
}

TEST(DeviceMeshTest, GroupKeepsTheOtherCoordinates) {
  const DeviceMesh mesh = flat_mesh({{"replicate", 2}, {"shard", 4}});
  EXPECT_EQ(mesh.group(Names{"shard"}, 6), (std::vector<int>{4, 5, 6, 7}));
  EXPECT_EQ(mesh.group(Names{"replicate"}, 6), (std::vector<int>{2, 6}));
  EXPECT_EQ(mesh.group(Names{}, 6), (std::vector<int>{6}));
}

TEST(DeviceMeshTest, FirstNamedAxisOfAGroupIsSlowest) {
  const DeviceMesh mesh = flat_mesh({{"replicate", 2}, {"shard", 3}});
  EXPECT_EQ(mesh.group(Names{"replicate", "shard"}, 4), (std::vector<int>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(mesh.group(Names{"shard", "replicate"}, 4), (std::vector<int>{0, 3, 1, 4, 2, 5}));
}

TEST(DeviceMeshTest, MeshWithoutAxesHoldsOneRank) {
  const DeviceMesh mesh = flat_mesh({});
  EXPECT_EQ(mesh.size(), 1);
  EXPECT_EQ(mesh.group(Names{}, 0), (std::vector<int>{0}));
  EXPECT_EQ(mesh.tier(Names{}), Tier::kIntra);
  EXPECT_EQ(to_text(mesh), "mesh()");
}

TEST(DeviceMeshTest, GroupsPartitionTheRanksInAnOrderAllMembersAgreeOn) {
  const std::vector<std::vector<MeshAxis>> meshes = {
      {{"a", 1}},
      {{"a", 7}},
      {{"a", 2}, {"b", 3}},
      {{"a", 1}, {"b", 5}, {"c", 1}},
      {{"a", 2}, {"b", 3}, {"c", 4}},
      {{"a", 2}, {"b", 1}, {"c", 3}, {"d", 2}},
  };
  for (const std::vector<MeshAxis>& axes : meshes) {
    const DeviceMesh mesh = flat_mesh(axes);
    for (unsigned subset = 0; subset < 1U << axes.size(); ++subset) {
      Names names;
      int group_size = 1;
      for (std::size_t i = 0; i < axes.size(); ++i) {
        if (subset >> i & 1U) {
          names.push_back(axes[i].name);
          group_size *= axes[i].size;
        }
      }
      do {  // every order of the names
        std::map<std::vector<int>, int> num_members_seen;
        for (int rank = 0; rank < mesh.size(); ++rank) {
          const std::vector<int> group = mesh.group(names, rank);
          ASSERT_EQ(static_cast<int>(group.size()), group_size);
          std::size_t position = 0;  // row-major in the order of the names
          for (const std::string& name : names) {
            position = position * static_cast<std::size_t>(mesh.axis_size(name)) +
                       static_cast<std::size_t>(mesh.coordinate(rank, name));
          }
          ASSERT_EQ(group[position], rank) << to_text(mesh);
          ++num_members_seen[group];
        }
        std::set<int> ranks;
        for (const auto& [group, num_members] : num_members_seen) {
          ASSERT_EQ(num_members, group_size);
          ranks.insert(group.begin(), group.end());
        }
        ASSERT_EQ(static_cast<int>(num_members_seen.size()) * group_size, mesh.size());
        ASSERT_EQ(static_cast<int>(ranks.size()), mesh.size());
      } while (std::next_permutation(names.begin(), names.end()));
    }
  }
}

TEST(DeviceMeshTest, TierFollowsTheSupernodes) {
  const DeviceMesh mesh =
      two_hosts({{"replicate", 2}, {"shard", 2}}, {"host0", "host0", "host1", "host1"});
  EXPECT_EQ(mesh.tier(Names{}), Tier::kIntra);
  EXPECT_EQ(mesh.tier(Names{"shard"}), Tier::kIntra);
  EXPECT_EQ(mesh.tier(Names{"replicate"}), Tier::kInter);
  EXPECT_EQ(mesh.tier(Names{"shard", "replicate"}), Tier::kInter);
}

TEST(DeviceMeshTest, TierFollowsRanksDealtOutInTurn) {
  const DeviceMesh mesh =
      two_hosts({{"replicate", 2}, {"shard", 2}}, {"host0", "host1", "host0", "host1"});
  EXPECT_EQ(mesh.tier(Names{"shard"}), Tier::kInter);
  EXPECT_EQ(mesh.tier(Names{"replicate"}), Tier::kIntra);
}

TEST(DeviceMeshTest, OneGroupAcrossSupernodesMakesTheTierInter) {
  const DeviceMesh mesh = two_hosts({{"dp", 2}, {"shard", 3}}, {"a", "a", "a", "a", "b", "b"});
  EXPECT_EQ(mesh.tier(Names{"shard"}), Tier::kInter);
}

TEST(DeviceMeshTest, TierAgreesWithTheGroupsThemselves) {
  const std::vector<std::string> names = {"a", "b", "c"};
  for (unsigned pattern = 0; pattern < 1U << 12U; pattern += 7) {
    std::vector<std::string> labels;
    for (unsigned rank = 0; rank < 12; ++rank) {
      labels.push_back(pattern >> rank & 1U ? "x" : "y");
    }
    const DeviceMesh mesh = two_hosts({{"a", 2}, {"b", 3}, {"c", 2}}, labels);
    for (unsigned subset = 0; subset < 8; ++subset) {
      Names group_axes;
      for (std::size_t i = 0; i < 3; ++i) {
        if (subset >> i & 1U) {
          group_axes.push_back(names[i]);
        }
      }
      bool all_inside = true;
      for (int rank = 0; rank < mesh.size(); ++rank) {
        all_inside &= mesh.topology().all_in_one_supernode(mesh.group(group_axes, rank));
      }
      ASSERT_EQ(mesh.tier(group_axes), all_inside ? Tier::kIntra : Tier::kInter);
    }
  }
}

TEST(DeviceMeshTest, HandlesAHundredThousandRanks) {
  std::vector<std::string> labels;
  for (int rank = 0; rank < 100'000; ++rank) {
    labels.push_back(std::to_string(rank / 8));
  }
  const DeviceMesh mesh(
      {{"pp", 5}, {"replicate", 2'500}, {"shard", 4}, {"tp", 2}}, Topology::from_labels(labels)
  );
  EXPECT_EQ(mesh.tier(Names{"shard", "tp"}), Tier::kIntra);
  EXPECT_EQ(mesh.tier(Names{"replicate"}), Tier::kInter);
  const std::vector<int> group = mesh.group(Names{"shard", "replicate"}, 99'999);
  ASSERT_EQ(group.size(), 10'000U);
  EXPECT_EQ(group.front(), 80'001);
  EXPECT_EQ(group[1], 80'009);
  EXPECT_EQ(group.back(), 99'999);
}

TEST(DeviceMeshTest, PrintsAxesAndTiers) {
  EXPECT_EQ(to_text(flat_mesh({{"replicate", 2}, {"shard", 4}})), "mesh(replicate=2, shard=4)");
  EXPECT_EQ(to_text(Tier::kIntra), "intra");
  EXPECT_EQ(to_text(Tier::kInter), "inter");
}

TEST(DeviceMeshTest, RejectsBadAxes) {
  HS_EXPECT_INVALID(flat_mesh({{"a", 2}, {"", 1}}), "axis 1 of 2 has no name");
  HS_EXPECT_INVALID(flat_mesh({{"a", 2}, {"b", 1}, {"a", 1}}), "'a' is given twice", "0 and 2");
  const Topology two = Topology::single_supernode(2);
  HS_EXPECT_INVALID(DeviceMesh({{"a", 2}, {"b", 0}}, two), "axis 'b' has size 0");
  HS_EXPECT_INVALID(DeviceMesh({{"a", -2}, {"b", -1}}, two), "axis 'a' has size -2");
}

TEST(DeviceMeshTest, RejectsSizesThatAreNotTheWorldSize) {
  const Topology eight = Topology::single_supernode(8);
  HS_EXPECT_INVALID(
      DeviceMesh({{"replicate", 2}, {"shard", 3}}, eight),
      "replicate=2, shard=3",
      "6 ranks",
      "the job has 8"
  );
  HS_EXPECT_INVALID(DeviceMesh({}, eight), "1 ranks", "the job has 8");
  const int huge = 2'000'000'000;  // the product must not wrap around to 8
  HS_EXPECT_INVALID(
      DeviceMesh({{"a", huge}, {"b", huge}, {"c", huge}}, eight), "more than 8 ranks"
  );
}

TEST(DeviceMeshTest, RejectsUnknownAxesWithTheNearestName) {
  const DeviceMesh mesh = flat_mesh({{"replicate", 2}, {"shard", 2}});
  HS_EXPECT_INVALID(
      mesh.axis_index("shrad"),
      "unknown axis 'shrad'",
      "replicate=2, shard=2",
      "did you mean 'shard'?"
  );
  HS_EXPECT_INVALID(mesh.axis_size("tp"), "unknown axis 'tp'");
  HS_EXPECT_INVALID(mesh.coordinate(0, "tp"), "unknown axis 'tp'");
  HS_EXPECT_INVALID(mesh.group(Names{"shard", "tp"}, 0), "unknown axis 'tp'");
  HS_EXPECT_INVALID(mesh.tier(Names{"tp"}), "unknown axis 'tp'");
  HS_EXPECT_INVALID(flat_mesh({}).axis_index("tp"), "the mesh has no axes");
}

TEST(DeviceMeshTest, RejectsRepeatedAxesAndRanksOutOfRange) {
  const DeviceMesh mesh = flat_mesh({{"replicate", 2}, {"shard", 2}});
  HS_EXPECT_INVALID(mesh.group(Names{"shard", "shard"}, 0), "'shard' is repeated");
  HS_EXPECT_INVALID(mesh.tier(Names{"shard", "shard"}), "'shard' is repeated");
  HS_EXPECT_INVALID(mesh.group(Names{"shard"}, 4), "rank 4", "0 to 3");
  HS_EXPECT_INVALID(mesh.coordinate(-1, "shard"), "rank -1", "0 to 3");
}

}  // namespace
}  // namespace hypershard::layout
