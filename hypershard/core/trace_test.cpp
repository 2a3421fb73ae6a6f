// Why: a trace must open in the viewers, so its JSON is checked in structure: lanes, nesting,
// arrows, ranks, and clocks of several hosts.
#include "hypershard/core/trace.h"

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "hypershard/core/clock.h"
#include "hypershard/core/error.h"
#include "hypershard/core/log_capture.h"

namespace hypershard {
namespace {

using Json = nlohmann::json;

class TraceTest : public testing::Test {
 protected:
  TraceTest()
      : folder_(std::filesystem::path(testing::TempDir()) / ("trace_" + std::to_string(getpid()))) {
    std::filesystem::create_directories(folder_);
    start_trace();
  }
  ~TraceTest() override {
    stop_trace();
    std::filesystem::remove_all(folder_);
  }

  static Json events(const std::string& phase) {
    Json found = Json::array();
    const Json trace = Json::parse(trace_json());
    for (const Json& event : trace.at("traceEvents")) {
      if (event.at("ph") == phase) {
        found.push_back(event);
      }
    }
    return found;
  }

  /// Names of the lanes, by pid and tid.
  static std::map<std::pair<int, int>, std::string> rows() {
    std::map<std::pair<int, int>, std::string> names;
    for (const Json& event : events("M")) {
      if (event.at("name") == "thread_name") {
        names[{event.at("pid"), event.at("tid")}] = event.at("args").at("name");
      }
    }
    return names;
  }

  std::string path(const char* name) const { return (folder_ / name).string(); }

  std::filesystem::path folder_;
};

TEST_F(TraceTest, SpansCarryNameLaneTimesAndBytes) {
  const std::int64_t before_ns = now_ns();
  {
    TraceSpan span(TraceLane::kUnshard, "unshard ", "blocks.3");
    span.set_bytes(4096);
  }
  const std::int64_t after_ns = now_ns();
  const Json spans = events("X");
  ASSERT_EQ(spans.size(), 1U);
  EXPECT_EQ(spans[0].at("name"), "unshard blocks.3");
  EXPECT_EQ(spans[0].at("cat"), "unshard");
  EXPECT_EQ(spans[0].at("args").at("bytes"), 4096);
  const double begin_us = spans[0].at("ts");
  const double duration_us = spans[0].at("dur");
  EXPECT_GE(begin_us, static_cast<double>(before_ns) * 1e-3);
  EXPECT_LE(begin_us + duration_us, static_cast<double>(after_ns) * 1e-3 + 1e-3);
  EXPECT_EQ((rows()[{0, spans[0].at("tid")}]), "unshard");
}

TEST_F(TraceTest, NothingIsRecordedWhileOff) {
  stop_trace();
  EXPECT_FALSE(trace_enabled());
  { const TraceSpan span(TraceLane::kCompute, "x"); }
  trace_span({.lane = TraceLane::kReduce, .name = "y", .begin_ns = now_ns(), .end_ns = now_ns()});
  trace_instant(TraceLane::kOther, "z");
  trace_counter("c", 1);
  EXPECT_EQ(Json::parse(trace_json()).at("traceEvents"), Json::array());
}

TEST_F(TraceTest, SpanOpenAtTheStopIsKept) {
  {
    const TraceSpan span(TraceLane::kCompute, "open");
    stop_trace();
  }
  EXPECT_EQ(events("X").size(), 1U);
}

TEST_F(TraceTest, StartForgetsTheTraceBefore) {
  const TraceSpan across(TraceLane::kCompute, "across");
  { const TraceSpan span(TraceLane::kCompute, "old"); }
  start_trace();
  { const TraceSpan span(TraceLane::kCompute, "new"); }
  const Json spans = events("X");
  ASSERT_EQ(spans.size(), 1U);
  EXPECT_EQ(spans[0].at("name"), "new");
}

void add_span(const char* name, TraceLane lane, std::int64_t begin_ns, std::int64_t end_ns) {
  static const std::int64_t kBaseNs = now_ns();
  trace_span(
      {.lane = lane, .name = name, .begin_ns = kBaseNs + begin_ns, .end_ns = kBaseNs + end_ns}
  );
}

TEST_F(TraceTest, OverlappingSpansGetRowsOfTheirOwnAndNestedOnesDoNot) {
  add_span("outer", TraceLane::kReduce, 1'000'000'000, 1'000'000'100);
  add_span("inner", TraceLane::kReduce, 1'000'000'010, 1'000'000'050);
  add_span("crossing", TraceLane::kReduce, 1'000'000'040, 1'000'000'120);
  add_span("after", TraceLane::kReduce, 1'000'000'100, 1'000'000'200);
  add_span("elsewhere", TraceLane::kWait, 1'000'000'040, 1'000'000'120);
  std::map<std::string, std::string> row_of;
  auto names = rows();
  for (const Json& span : events("X")) {
    row_of[span.at("name")] = names[{0, span.at("tid")}];
  }
  const std::map<std::string, std::string> expected = {
      {"outer", "reduce"},
      {"inner", "reduce"},
      {"crossing", "reduce 2"},
      {"after", "reduce"},
      {"elsewhere", "wait"},
  };
  EXPECT_EQ(row_of, expected);
}

TEST_F(TraceTest, ArrowsJoinTwoSpans) {
  const std::uint64_t flow = next_trace_flow();
  {
    TraceSpan from(TraceLane::kReduce, "from");
    from.flow_to(flow);
  }
  {
    TraceSpan to(TraceLane::kWait, "to");
    to.flow_from(flow);
  }
  const Json spans = events("X");
  const Json starts = events("s");
  const Json ends = events("f");
  ASSERT_EQ(starts.size(), 1U);
  ASSERT_EQ(ends.size(), 1U);
  EXPECT_EQ(starts[0].at("id"), flow);
  EXPECT_EQ(ends[0].at("id"), flow);
  EXPECT_EQ(starts[0].at("tid"), spans[0].at("tid"));
  EXPECT_EQ(ends[0].at("tid"), spans[1].at("tid"));
  EXPECT_EQ(ends[0].at("bp"), "e");
}

TEST_F(TraceTest, FlowNamesOfRanksDiffer) {
  const ThreadErrorRank first(0, 2);
  const std::uint64_t flow = next_trace_flow();
  const ThreadErrorRank second(1, 2);
  EXPECT_NE(flow >> 40, next_trace_flow() >> 40);
}

TEST_F(TraceTest, RanksThatAreThreadsBecomeProcesses) {
  constexpr int kRanks = 4;
  constexpr int kSpans = 300;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([rank] {
      const ThreadErrorRank thread_rank(rank, kRanks);
      for (int i = 0; i < kSpans; ++i) {
        const TraceSpan span(TraceLane::kCompute, "forward ", std::to_string(i % 7));
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  std::map<int, int> num_spans;
  for (const Json& span : events("X")) {
    ++num_spans[span.at("pid")];
  }
  EXPECT_EQ(num_spans, (std::map<int, int>{{0, kSpans}, {1, kSpans}, {2, kSpans}, {3, kSpans}}));
  std::map<int, std::string> names;
  for (const Json& event : events("M")) {
    if (event.at("name") == "process_name") {
      names[event.at("pid")] = event.at("args").at("name");
    }
  }
  EXPECT_EQ(names[3], "rank 3");
}

TEST_F(TraceTest, ReadingWhileThreadsRecordIsSafe) {
  std::atomic<bool> stop{false};
  std::thread recorder([&stop] {
    while (!stop.load()) {
      const TraceSpan span(TraceLane::kCompute, "x");
    }
  });
  for (int i = 0; i < 3; ++i) {
    EXPECT_NO_THROW(Json::parse(trace_json()));
    start_trace({.max_events = 1000});
  }
  stop.store(true);
  recorder.join();
}

TEST_F(TraceTest, InstantsAndCountersAreWritten) {
  trace_instant(TraceLane::kData, "epoch ", "2");
  trace_counter("memory", 1.5);
  const Json instants = events("i");
  ASSERT_EQ(instants.size(), 1U);
  EXPECT_EQ(instants[0].at("name"), "epoch 2");
  EXPECT_EQ(instants[0].at("s"), "t");
  const Json counters = events("C");
  ASSERT_EQ(counters.size(), 1U);
  EXPECT_EQ(counters[0].at("args").at("value"), 1.5);
}

TEST_F(TraceTest, DropsWhatExceedsTheBoundAndSaysSo) {
  start_trace({.max_events = 3});
  for (int i = 0; i < 5; ++i) {
    const TraceSpan span(TraceLane::kCompute, "x");
  }
  const LogCapture capture;
  write_trace(path("t.json"));
  EXPECT_EQ(events("X").size(), 3U);
  EXPECT_EQ(Json::parse(trace_json()).at("otherData").at("dropped_events"), 2);
  EXPECT_EQ(capture.count(LogLevel::kWarn, "lacks the last 2 events"), 1);
}

TEST_F(TraceTest, NamesAreEscaped) {
  { const TraceSpan span(TraceLane::kCompute, "a\"b\\\n\xff"); }
  EXPECT_EQ(events("X")[0].at("name"), "a\"b\\\n\uFFFD");
}

TEST_F(TraceTest, WritesWholeFilesOnly) {
  { const TraceSpan span(TraceLane::kCompute, "x"); }
  write_trace(path("t.json"));
  std::ifstream stream(path("t.json"));
  EXPECT_EQ(Json::parse(stream).at("displayTimeUnit"), "ms");
  EXPECT_FALSE(std::filesystem::exists(path("t.json.partial")));
  EXPECT_THROW(write_trace(path("no/such/folder/t.json")), IoError);
}

TEST_F(TraceTest, MergeShiftsClocksOfOtherHosts) {
  const auto write = [this](const char* name, const char* boot, std::int64_t offset_ns, int pid) {
    const Json trace = {
        {"traceEvents",
         {{{"name", name}, {"ph", "X"}, {"ts", 10.0}, {"pid", pid}},
          {{"name", "m"}, {"ph", "M"}, {"pid", pid}}}},
        {"otherData", {{"boot_id", boot}, {"wall_minus_monotonic_ns", offset_ns}}},
    };
    std::ofstream(path(name)) << trace;
    return path(name);
  };
  const std::vector<std::string> paths = {
      write("a", "here", 1000, 0), write("b", "here", 7000, 1), write("c", "there", 4000, 2)
  };
  merge_traces(paths, path("all.json"));
  std::ifstream stream(path("all.json"));
  std::map<std::string, double> times;
  const Json merged = Json::parse(stream);
  for (const Json& event : merged.at("traceEvents")) {
    if (event.at("ph") == "X") {
      times[event.at("name")] = event.at("ts");
    }
  }
  EXPECT_EQ(times, (std::map<std::string, double>{{"a", 10.0}, {"b", 10.0}, {"c", 13.0}}));
}

TEST_F(TraceTest, MergeRejectsWhatIsNoTrace) {
  std::ofstream(path("bad")) << "{}";
  const std::vector<std::string> bad = {path("bad")};
  const std::vector<std::string> missing = {path("missing")};
  EXPECT_THROW(merge_traces(bad, path("all.json")), IoError);
  EXPECT_THROW(merge_traces(missing, path("all.json")), IoError);
  EXPECT_THROW(merge_traces({}, path("all.json")), InvalidArgument);
}

}  // namespace
}  // namespace hypershard
