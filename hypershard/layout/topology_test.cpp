// Tests that every rank numbers the supernodes alike, whatever the labels are called.
// Expected maps are written out.
#include "hypershard/layout/topology.h"

#include <gtest/gtest.h>

#include "hypershard/layout/thrown_text.h"

namespace hypershard::layout {
namespace {

TEST(TopologyTest, SingleSupernodeHoldsAllRanks) {
  const Topology topology = Topology::single_supernode(3);
  EXPECT_EQ(topology.world_size(), 3);
  EXPECT_EQ(topology.num_supernodes(), 1);
  EXPECT_EQ(topology.ranks_of(0), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(topology.supernode_of(2), 0);
}

TEST(TopologyTest, EqualLabelsShareASupernodeAndIdsFollowTheLowestRank) {
  const Topology topology = Topology::from_labels({"z", "a", "z", "m", "a"});
  EXPECT_EQ(topology.world_size(), 5);
  EXPECT_EQ(topology.num_supernodes(), 3);
  EXPECT_EQ(topology.ranks_of(0), (std::vector<int>{0, 2}));
  EXPECT_EQ(topology.ranks_of(1), (std::vector<int>{1, 4}));
  EXPECT_EQ(topology.ranks_of(2), (std::vector<int>{3}));
  EXPECT_EQ(topology.supernode_of(0), 0);
  EXPECT_EQ(topology.supernode_of(3), 2);
  EXPECT_EQ(topology.supernode_of(4), 1);
}

TEST(TopologyTest, EmptyLabelIsALabelLikeAnother) {
  EXPECT_EQ(Topology::from_labels({"", "", "a"}).num_supernodes(), 2);
}

TEST(TopologyTest, TellsWhetherRanksLieTogether) {
  const Topology topology = Topology::from_labels({"a", "a", "b", "b", "a"});
  EXPECT_TRUE(topology.all_in_one_supernode({}));
  EXPECT_TRUE(topology.all_in_one_supernode({2}));
  EXPECT_TRUE(topology.all_in_one_supernode({4, 0, 1}));
  EXPECT_FALSE(topology.all_in_one_supernode({1, 2}));
  EXPECT_FALSE(topology.all_in_one_supernode({0, 4, 3}));
}

TEST(TopologyTest, SupernodesPartitionAHundredThousandRanks) {
  std::vector<std::string> labels;
  for (int rank = 0; rank < 100'000; ++rank) {
    labels.push_back("host" + std::to_string(rank % 12'500));
  }
  const Topology topology = Topology::from_labels(labels);
  ASSERT_EQ(topology.num_supernodes(), 12'500);
  for (int supernode = 0; supernode < topology.num_supernodes(); ++supernode) {
    ASSERT_EQ(topology.ranks_of(supernode).size(), 8U);
    ASSERT_EQ(topology.ranks_of(supernode).front(), supernode);
    ASSERT_EQ(topology.ranks_of(supernode).back(), supernode + 87'500);
  }
}

TEST(TopologyTest, RejectsAJobWithoutRanks) {
  HS_EXPECT_INVALID(Topology::from_labels({}), "0 labels", "one label for each rank");
  HS_EXPECT_INVALID(Topology::single_supernode(0), "world size 0", "at least 1");
  HS_EXPECT_INVALID(Topology::single_supernode(-4), "world size -4");
}

TEST(TopologyTest, RejectsRanksAndSupernodesOutOfRange) {
  const Topology topology = Topology::from_labels({"a", "b", "b"});
  HS_EXPECT_INVALID(topology.supernode_of(3), "rank 3", "0 to 2");
  HS_EXPECT_INVALID(topology.supernode_of(-1), "rank -1", "0 to 2");
  HS_EXPECT_INVALID(topology.ranks_of(2), "supernode 2", "0 to 1");
  HS_EXPECT_INVALID(topology.ranks_of(-1), "supernode -1", "0 to 1");
  HS_EXPECT_INVALID(topology.all_in_one_supernode({0, 7}), "rank 7", "0 to 2");
}

}  // namespace
}  // namespace hypershard::layout
