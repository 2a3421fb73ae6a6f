// Why: log lines are grepped and read beside each other from many ranks, so form and filter are
// fixed.
#include "hypershard/core/log.h"

#include <fcntl.h>
#include <regex>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "hypershard/core/error.h"
#include "hypershard/core/log_capture.h"

namespace hypershard {
namespace {

class LogTest : public testing::Test {
 protected:
  void SetUp() override { configure_log(LogLevel::kInfo, "0"); }
  void TearDown() override {
    configure_log(LogLevel::kInfo, "0");
    set_error_rank(-1, 0);
  }
};

TEST_F(LogTest, LineNamesLevelRankAndModule) {
  set_error_rank(3, 8);
  const LogCapture capture;
  HS_LOG_WARN("shm: ", 2, " ranks joined");
  ASSERT_EQ(capture.lines().size(), 1U);
  EXPECT_EQ(capture.lines()[0].level, LogLevel::kWarn);
  EXPECT_EQ(capture.lines()[0].text, "W rank 3/8 core | shm: 2 ranks joined");
}

TEST_F(LogTest, LineWithoutRankOmitsIt) {
  const LogCapture capture;
  HS_LOG_INFO("hello");
  ASSERT_EQ(capture.lines().size(), 1U);
  EXPECT_EQ(capture.lines()[0].text, "I core | hello");
}

TEST_F(LogTest, LevelCutsWhatIsLessSevere) {
  const LogCapture capture;
  configure_log(LogLevel::kWarn, "0");
  HS_LOG_ERROR("e");
  HS_LOG_WARN("w");
  HS_LOG_INFO("i");
  configure_log(LogLevel::kDebug, "0");
  HS_LOG_DEBUG("d");
  EXPECT_EQ(capture.lines().size(), 3U);
  EXPECT_EQ(capture.count(LogLevel::kInfo), 0);
  EXPECT_EQ(capture.count(LogLevel::kDebug, "d"), 1);
}

TEST_F(LogTest, PartsOfSilentLinesAreNotEvaluated) {
  const LogCapture capture;
  int num_evaluated = 0;
  HS_LOG_DEBUG("value ", ++num_evaluated);
  EXPECT_EQ(num_evaluated, 0);
  HS_LOG_INFO("value ", ++num_evaluated);
  EXPECT_EQ(num_evaluated, 1);
}

TEST_F(LogTest, OtherRanksLogOnlyWarningsAndErrors) {
  const LogCapture capture;
  const ThreadErrorRank rank(2, 4);
  HS_LOG_INFO("i");
  HS_LOG_WARN("w");
  HS_LOG_ERROR("e");
  EXPECT_EQ(capture.count(LogLevel::kInfo), 0);
  EXPECT_EQ(capture.count(LogLevel::kWarn), 1);
  EXPECT_EQ(capture.count(LogLevel::kError), 1);
}

TEST_F(LogTest, RanksAreChosenByListRangeOrAll) {
  const auto logs = [](const char* ranks, int rank) {
    configure_log(LogLevel::kInfo, ranks);
    const ThreadErrorRank thread_rank(rank, 16);
    return log_enabled(LogLevel::kInfo);
  };
  EXPECT_TRUE(logs("0,4-7", 0));
  EXPECT_FALSE(logs("0,4-7", 3));
  EXPECT_TRUE(logs("0,4-7", 4));
  EXPECT_TRUE(logs("0,4-7", 7));
  EXPECT_FALSE(logs("0,4-7", 8));
  EXPECT_TRUE(logs("all", 15));
}

TEST_F(LogTest, RejectsMalformedRanks) {
  for (const char* ranks : {"", "x", "1,", "4-2", "-1", "1-", "1 2"}) {
    try {
      configure_log(LogLevel::kInfo, ranks);
      FAIL() << "accepted '" << ranks << "'";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(
          std::string(error.what()).find("expected all, or a list such as 0,4-7"), std::string::npos
      );
    }
  }
}

TEST_F(LogTest, CapturesNest) {
  const LogCapture outer;
  {
    const LogCapture inner;
    HS_LOG_INFO("to inner");
    EXPECT_TRUE(inner.contains("to inner"));
  }
  HS_LOG_INFO("to outer");
  EXPECT_FALSE(outer.contains("to inner"));
  EXPECT_TRUE(outer.contains("to outer"));
}

TEST_F(LogTest, LinesOfThreadsStayWhole) {
  constexpr int kThreads = 4;
  constexpr int kLines = 200;
  configure_log(LogLevel::kInfo, "all");
  const LogCapture capture;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kThreads; ++rank) {
    threads.emplace_back([rank] {
      const ThreadErrorRank thread_rank(rank, kThreads);
      for (int i = 0; i < kLines; ++i) {
        HS_LOG_INFO("line ", i);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(capture.lines().size(), std::size_t{kThreads} * kLines);
  EXPECT_EQ(capture.count(LogLevel::kInfo, "rank 2/4 core | line 199"), 1);
}

TEST_F(LogTest, WritesToStderrWithTheTime) {
  const int file = memfd_create("stderr", 0);
  ASSERT_GE(file, 0);
  const int before = dup(STDERR_FILENO);
  LogSink* const sink = set_log_sink(nullptr);
  dup2(file, STDERR_FILENO);
  HS_LOG_INFO("50% of {} done");
  dup2(before, STDERR_FILENO);
  set_log_sink(sink);
  close(before);
  char buffer[256] = {};
  const ssize_t size = pread(file, buffer, sizeof(buffer) - 1, 0);
  close(file);
  ASSERT_GT(size, 0);
  const std::regex form(R"(\d\d:\d\d:\d\d\.\d\d\d I core \| 50% of \{\} done\n)");
  EXPECT_TRUE(std::regex_match(buffer, form)) << buffer;
}

}  // namespace
}  // namespace hypershard
