// Why: a plan for ranks that are not here must see the groups, the log and the bytes of the real
// thing, and cost nothing.
#include "hypershard/comm/fake/fake_world.h"

#include <gtest/gtest.h>

#include <ATen/Functions.h>

namespace hypershard::comm {
namespace {

TEST(FakeWorldTest, CountsBytesOfTensorsThatHaveNoMemory) {
  const auto world = make_fake_world(70'000, layout::Topology::single_supernode(100'000));
  const auto c = world->world_communicator();
  const auto meta = at::TensorOptions(at::kMeta).dtype(at::kBFloat16);
  const std::int64_t shard = std::int64_t{1} << 20;
  c->all_gather(at::empty({shard * 100'000}, meta), at::empty({shard}, meta))->wait();
  EXPECT_EQ(c->log().bytes(Op::kAllGather), shard * 100'000 * 2);
  EXPECT_TRUE(c->barrier()->test());
}

// What a bucket puts on a slow link is known before there is one.
TEST(FakeWorldTest, CountsWhatSegmentsWouldSend) {
  const auto world = make_fake_world(1, layout::Topology::single_supernode(4));
  const auto c = world->world_communicator();
  const auto meta = at::TensorOptions(at::kMeta).dtype(at::kFloat);
  const std::vector<ReduceSegment> bucket = {
      {at::empty({25}, meta), at::empty({100}, meta)},
      {at::empty({0}, meta), at::empty({10}, meta), {10, 0, 0, 0}}
  };
  c->reduce_scatter(bucket, {ReduceOp::kSum, 4, at::kBFloat16}, "bucket 0")->wait();
  EXPECT_EQ(
      to_text(c->log().entries().back()),
      "reduce_scatter #0 for unit 'bucket 0' on 'world' (bfloat16, 220 bytes)"
  );
  EXPECT_EQ(c->stats().sent_bytes, 2 * (75 + 10));
  EXPECT_EQ(c->stats().received_bytes, 2 * (3 * 25));
}

TEST(FakeWorldTest, LeavesTensorsAlone) {
  const auto c = make_fake_world(0, layout::Topology::single_supernode(2))->world_communicator();
  const at::Tensor tensor = at::full({4}, 3.0);
  c->all_reduce(tensor)->wait();
  EXPECT_EQ(tensor.sum().item<int>(), 12);
}

TEST(FakeWorldTest, OffersMemoryOfAnySizeInsideASupernode) {
  const auto c = make_fake_world(0, layout::Topology::single_supernode(8))->world_communicator();
  ASSERT_TRUE(c->has_shared_memory());
  // No larger: ThreadSanitizer leaves no terabyte of addresses in one piece.
  constexpr std::int64_t kBytes = std::int64_t{1} << 38;
  const auto buffer = c->allocate_shared(kBytes, "more than there is");
  buffer->write()[kBytes - 1] = std::byte{9};
  EXPECT_EQ(buffer->read()[kBytes - 1], std::byte{9});
  const auto arena = c->allocate_symmetric(4096, "arena");
  EXPECT_EQ(arena->peer(3)[17], std::byte{0});
  const auto board = c->make_epoch_board(4, "epochs");
  EXPECT_TRUE(board->reached(2, 1000));
  board->wait_all(2, 1000, "readers", "blocks.0");
  const auto off = make_fake_world(0, layout::Topology::single_supernode(8), {false});
  EXPECT_FALSE(off->world_communicator()->has_shared_memory());
}

}  // namespace
}  // namespace hypershard::comm
