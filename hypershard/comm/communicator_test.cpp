// Why: what every back end may rely on: bad calls are refused before they start, with the values in
// the message, and good ones are logged.
#include "hypershard/comm/communicator.h"

#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/Functions.h>

#include "hypershard/comm/fake/fake_world.h"
#include "hypershard/core/error.h"

namespace hypershard::comm {
namespace {

std::shared_ptr<Communicator> three_ranks() {
  return make_fake_world(1, layout::Topology::single_supernode(3))->world_communicator();
}

/// Returns the text of the InvalidArgument that `call` throws.
template <class Call>
std::string refused(Call call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

#define EXPECT_REFUSED(call, fragment)                         \
  do {                                                         \
    const std::string text = refused([&] { call; });           \
    EXPECT_NE(text.find(fragment), std::string::npos) << text; \
  } while (false)

TEST(CommunicatorTest, RefusesCountsThatDoNotFit) {
  const auto c = three_ranks();
  const at::Tensor whole = at::zeros({7});
  const at::Tensor part = at::zeros({2});
  using Counts = std::vector<std::int64_t>;
  EXPECT_REFUSED(c->all_gather(whole, part), "cannot be cut evenly over 3 ranks");
  EXPECT_REFUSED(c->all_gather(whole, part, Counts{5, 2}), "needs one entry a rank");
  EXPECT_REFUSED(c->all_gather(whole, part, Counts{6, 2, -1}), "negative");
  EXPECT_REFUSED(c->all_gather(whole, part, Counts{6, 2, 1}), "(9 vs. 7)");
  EXPECT_REFUSED(c->all_gather(whole, part, Counts{2, 4, 1}), "(2 vs. 4)");
  EXPECT_REFUSED(c->reduce_scatter(part, whole, Counts{2, 4, 1}), "(2 vs. 4)");
  EXPECT_REFUSED(
      c->all_to_all(whole, whole.clone(), Counts{2, 4, 1}, Counts{4, 2, 1}), "sends to itself"
  );
}

TEST(CommunicatorTest, RefusesDtypesThatDoNotFit) {
  const auto c = three_ranks();
  const at::Tensor floats = at::zeros({3});
  const at::Tensor one = at::zeros({1}, at::kBFloat16);
  EXPECT_REFUSED(c->all_gather(floats, one), "dtypes differ: output float32, input bfloat16");
  EXPECT_REFUSED(c->reduce_scatter(one, floats), "narrower than the input's");
  EXPECT_REFUSED(c->all_reduce(at::zeros({3}, at::kLong)), "cannot reduce int64");
  EXPECT_REFUSED(
      c->reduce_scatter(at::zeros({1}, at::kLong), at::zeros({3}, at::kLong)), "cannot reduce int64"
  );
  c->reduce_scatter(at::zeros({1}), at::zeros({3}, at::kHalf))->wait();
}

TEST(CommunicatorTest, RefusesTensorsThatAreNotContiguousOrUndefined) {
  const auto c = three_ranks();
  const at::Tensor columns = at::zeros({3, 4}).t();
  EXPECT_REFUSED(c->all_reduce(columns), "not contiguous: sizes [4, 3], strides [1, 4]");
  EXPECT_REFUSED(c->broadcast(at::Tensor(), 0), "undefined");
  EXPECT_REFUSED(c->broadcast(at::zeros({3}), 3), "root 3 is out of range (expected 0 to 2)");
}

TEST(CommunicatorTest, RefusesOverlapOtherThanThisRanksSlice) {
  const auto c = three_ranks();
  const at::Tensor whole = at::zeros({9});
  EXPECT_REFUSED(c->all_gather(whole, whole.narrow(0, 2, 3)), "overlaps `output` at byte 8");
  EXPECT_REFUSED(c->reduce_scatter(whole.narrow(0, 4, 3), whole), "slice, at byte 12");
  EXPECT_REFUSED(c->all_to_all(whole, whole), "no in-place form");
  c->all_gather(whole, whole.narrow(0, 3, 3))->wait();
  c->reduce_scatter(whole.narrow(0, 3, 3), whole)->wait();
}

TEST(CommunicatorTest, RefusesSegmentsThatDoNotFit) {
  const auto c = three_ranks();
  const at::Tensor whole = at::zeros({9});
  const at::Tensor part = at::zeros({3});
  using Segments = std::vector<ReduceSegment>;
  EXPECT_REFUSED(c->reduce_scatter(Segments{}), "no segments");
  EXPECT_REFUSED(
      c->reduce_scatter(Segments{{part, whole}, {part, at::zeros({9}), {4, 4, 1}}}, {}, "bucket 2"),
      "reduce_scatter of unit 'bucket 2' on 'world', segment 1: `output` does not have"
  );
  EXPECT_REFUSED(
      c->reduce_scatter(
          Segments{{part, whole}, {at::zeros({3}, at::kHalf), at::zeros({9}, at::kHalf)}}
      ),
      "segment 1 is unlike the first: input float16 on cpu"
  );
  EXPECT_REFUSED(
      c->reduce_scatter(Segments{{part, whole}, {part, at::zeros({9})}}), "segments 0 and 1 overlap"
  );
  EXPECT_REFUSED(
      c->reduce_scatter(Segments{{whole.narrow(0, 3, 3), whole}, {at::zeros({3}), whole}}),
      "segments 0 and 1 overlap, by 36 bytes"
  );
  EXPECT_REFUSED(
      c->reduce_scatter(Segments{{part, at::zeros({9})}, {whole.narrow(0, 2, 3), whole}}),
      "segment 1: `output` overlaps `input`"
  );
  c->reduce_scatter(Segments{{whole.narrow(0, 3, 3), whole}, {part, at::zeros({9})}})->wait();
  EXPECT_EQ(c->log().size(), 1U) << "what is refused is not logged";
}

TEST(CommunicatorTest, RefusesWireDtypesThatDoNotFit) {
  const auto c = three_ranks();
  const Reduction wire{ReduceOp::kSum, 1, at::kBFloat16};
  EXPECT_REFUSED(
      c->reduce_scatter(at::zeros({3}, at::kDouble), at::zeros({9}, at::kDouble), {}, wire),
      "values of float64 cannot travel as bfloat16"
  );
  EXPECT_REFUSED(
      c->all_reduce(at::zeros({3}), {ReduceOp::kSum, 1, at::kHalf}),
      "values of float32 cannot travel as float16"
  );
  c->all_reduce(at::zeros({3}), wire)->wait();
  c->all_reduce(at::zeros({3}, at::kBFloat16), wire)->wait();
}

TEST(CommunicatorTest, TakesTensorsOfAnyShapeByTheirElements) {
  const auto c = three_ranks();
  c->all_gather(at::zeros({3, 2, 5}), at::zeros({5, 2}))->wait();
  c->all_gather(at::zeros({0, 4}), at::zeros({0}))->wait();
  c->all_reduce(at::zeros({}))->wait();
  c->all_reduce(at::zeros({2, 2}, at::TensorOptions().requires_grad(true)))->wait();
}

TEST(CommunicatorTest, LogsEveryCallWithItsBytes) {
  const auto c = three_ranks();
  c->all_gather(at::zeros({6}), at::zeros({2}), {}, "blocks.0")->wait();
  c->reduce_scatter(at::zeros({2}), at::zeros({6}, at::kHalf), {}, ReduceOp::kSum, "blocks.0");
  c->barrier();
  const std::vector<LogEntry> entries = c->log().entries();
  ASSERT_EQ(entries.size(), 3U);
  EXPECT_EQ(
      to_text(entries[0]), "all_gather #0 for unit 'blocks.0' on 'world' (float32, 24 bytes)"
  );
  EXPECT_EQ(entries[1].payload_bytes, 12);
  EXPECT_EQ(to_text(entries[2]), "barrier #2 on 'world'");
  EXPECT_EQ(c->log().bytes(Op::kAllGather), 24);
  EXPECT_EQ(c->log().count(Op::kBarrier), 1);
}

TEST(CommunicatorTest, TellsThatItSharesNoMemory) {
  const auto c =
      make_fake_world(0, layout::Topology::from_labels({"a", "b"}))->world_communicator();
  EXPECT_FALSE(c->has_shared_memory());
  EXPECT_THROW(c->allocate_shared(8, "x"), Unsupported);
  EXPECT_THROW(c->allocate_symmetric(8, "x"), Unsupported);
  EXPECT_THROW(c->make_epoch_board(1, "x"), Unsupported);
}

}  // namespace
}  // namespace hypershard::comm
