// Why: groups are named and made once, and a mesh finds them by axis.
#include "hypershard/comm/world.h"

#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/Functions.h>

#include "hypershard/comm/fake/fake_world.h"
#include "hypershard/core/error.h"
#include "hypershard/testing/run_ranks.h"

namespace hypershard::comm {
namespace {

using Ranks = std::vector<int>;

layout::DeviceMesh two_by_two(const World& world) {
  return layout::DeviceMesh({{"replicate", 2}, {"shard", 2}}, world.topology());
}

TEST(WorldTest, MakesEachCommunicatorOnce) {
  const auto world = make_fake_world(1, layout::Topology::single_supernode(4));
  const auto a = world->communicator("a", {0, 1});
  EXPECT_EQ(world->communicator("a", {0, 1}), a);
  EXPECT_NE(world->communicator("b", {0, 1}), a);
  EXPECT_NE(world->communicator("a", {1, 0}), a);
  EXPECT_EQ(a->rank(), 1);
  EXPECT_EQ(world->communicator("a", {1, 0})->rank(), 0);
  EXPECT_EQ(world->world_communicator()->size(), 4);
}

TEST(WorldTest, RefusesGroupsThatMakeNoSense) {
  const auto world = make_fake_world(1, layout::Topology::single_supernode(4));
  EXPECT_THROW(world->communicator("a", {}), InvalidArgument);
  EXPECT_THROW(world->communicator("a", {0, 2}), InvalidArgument);
  EXPECT_THROW(world->communicator("a", {1, 4}), InvalidArgument);
  EXPECT_THROW(world->communicator("a", {1, 1}), InvalidArgument);
  EXPECT_THROW(make_fake_world(4, layout::Topology::single_supernode(4)), InvalidArgument);
}

TEST(WorldTest, GroupsKnowTheirTier) {
  const auto world = make_fake_world(0, layout::Topology::from_labels({"x", "x", "y", "y"}));
  EXPECT_EQ(world->communicator("a", {0, 1})->info().tier, layout::Tier::kIntra);
  EXPECT_EQ(world->communicator("b", {0, 2})->info().tier, layout::Tier::kInter);
}

TEST(ProcessMeshTest, GivesTheGroupsOfItsAxes) {
  const auto world = make_fake_world(2, layout::Topology::from_labels({"x", "x", "y", "y"}));
  const ProcessMesh mesh(world, two_by_two(*world));
  EXPECT_EQ(mesh.axis("shard")->info().global_ranks, (Ranks{2, 3}));
  EXPECT_EQ(mesh.axis("shard")->info().name, "shard");
  EXPECT_EQ(mesh.axis("replicate")->info().global_ranks, (Ranks{0, 2}));
  EXPECT_TRUE(mesh.axis("shard")->has_shared_memory());
  EXPECT_FALSE(mesh.axis("replicate")->has_shared_memory());
  const std::vector<std::string> both = {"shard", "replicate"};
  EXPECT_EQ(mesh.axes(both)->info().global_ranks, (Ranks{0, 2, 1, 3}));
  EXPECT_EQ(mesh.axes({})->info().global_ranks, (Ranks{2}));
  EXPECT_THROW(mesh.axis("tp"), InvalidArgument);
}

TEST(ProcessMeshTest, RefusesAMeshOfAnotherSize) {
  const auto world = make_fake_world(0, layout::Topology::single_supernode(4));
  const layout::DeviceMesh mesh({{"shard", 2}}, layout::Topology::single_supernode(2));
  EXPECT_THROW(ProcessMesh(world, mesh), InvalidArgument);
}

TEST(ProcessMeshTest, AxesOfAMeshWorkSideBySide) {
  testing::run_ranks(
      4,
      [](const std::shared_ptr<World>& world) {
        const ProcessMesh mesh(world, two_by_two(*world));
        at::Tensor shard = at::full({3}, 1.0 + mesh.rank());
        at::Tensor replicate = shard.clone();
        const WorkPtr a = mesh.axis("shard")->all_reduce(shard);
        const WorkPtr b = mesh.axis("replicate")->all_reduce(replicate);
        b->wait();
        a->wait();
        EXPECT_EQ(shard[0].item<int>(), mesh.rank() < 2 ? 1 + 2 : 3 + 4);
        EXPECT_EQ(replicate[0].item<int>(), mesh.rank() % 2 == 0 ? 1 + 3 : 2 + 4);
        world->shutdown();
      },
      {.supernodes = {"x", "x", "y", "y"}}
  );
}

}  // namespace
}  // namespace hypershard::comm
