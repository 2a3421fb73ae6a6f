// Why: shares must add up to the time they divide, whatever overlaps.
#include "hypershard/core/trace_shares.h"

#include <map>
#include <string>

#include <gtest/gtest.h>

#include "hypershard/core/clock.h"

namespace hypershard {
namespace {

class TraceSharesTest : public ::testing::Test {
 protected:
  TraceSharesTest() {
    start_trace();
    start_ns_ = now_ns();
  }
  ~TraceSharesTest() override { stop_trace(); }

  void span(TraceLane lane, const char* name, std::int64_t begin, std::int64_t end) {
    trace_span(
        {.lane = lane, .name = name, .begin_ns = start_ns_ + begin, .end_ns = start_ns_ + end}
    );
  }
  std::map<std::string, std::int64_t> shares(const char* outer) {
    std::map<std::string, std::int64_t> found;
    for (const TraceShare& share : trace_shares(0, outer)) {
      found[share.name] = share.exclusive_ns;
    }
    return found;
  }

  std::int64_t start_ns_ = 0;
};

TEST_F(TraceSharesTest, InnermostSpanHasTheTime) {
  span(TraceLane::kOther, "step", 0, 100);
  span(TraceLane::kCompute, "forward", 10, 60);
  span(TraceLane::kWait, "unshard a", 20, 25);
  span(TraceLane::kCompute, "forward", 70, 80);
  const auto found = shares("step");
  EXPECT_EQ(found.at("forward"), 55);
  EXPECT_EQ(found.at("unshard a"), 5);
  EXPECT_EQ(found.at("step"), 40);
}

TEST_F(TraceSharesTest, OverlapGoesToTheSpanThatBeganLast) {
  span(TraceLane::kOther, "step", 0, 100);
  span(TraceLane::kCompute, "a", 10, 50);
  span(TraceLane::kCompute, "b", 30, 70);
  const auto found = shares("step");
  EXPECT_EQ(found.at("a"), 20);
  EXPECT_EQ(found.at("b"), 40);
}

TEST_F(TraceSharesTest, OfEqualBeginsTheShorterIsTheInner) {
  span(TraceLane::kOther, "step", 0, 100);
  span(TraceLane::kCompute, "a", 10, 40);
  span(TraceLane::kCompute, "b", 10, 70);
  const auto found = shares("step");
  EXPECT_EQ(found.at("a"), 30);
  EXPECT_EQ(found.at("b"), 30);
}

TEST_F(TraceSharesTest, SumIsTheTimeOfTheOuterSpans) {
  span(TraceLane::kOther, "step", 0, 100);
  span(TraceLane::kOther, "step", 150, 260);
  span(TraceLane::kCompute, "around", 90, 160);    // partly inside
  span(TraceLane::kCompute, "outside", 110, 140);  // not at all
  span(TraceLane::kCompute, "same", 0, 100);
  span(TraceLane::kReduce, "in flight", 0, 260);
  span(TraceLane::kWait, "none", 50, 50);
  std::int64_t sum = 0;
  for (const auto& [name, ns] : shares("step")) {
    EXPECT_NE(name, "outside");
    EXPECT_NE(name, "in flight");
    sum += ns;
  }
  EXPECT_EQ(sum, 210);
}

TEST_F(TraceSharesTest, WithoutTheOuterSpanThereIsNothing) {
  span(TraceLane::kCompute, "a", 10, 50);
  EXPECT_TRUE(trace_shares(0, "step").empty());
}

}  // namespace
}  // namespace hypershard
