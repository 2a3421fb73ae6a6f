// Why: the harness for real processes must set the environment, keep outputs apart, and leave no
// process whatever its ranks do.
#include "hypershard/testing/process_ranks.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "hypershard/testing/worker.h"

namespace hypershard::testing {
namespace {

std::string env_of(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "unset" : value;
}

const bool kReport = register_worker("report", [](const std::vector<std::string>& arguments) {
  std::printf("argument %s\n", arguments.at(0).c_str());
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "EXTRA"}) {
    std::printf("%s=%s\n", name, env_of(name).c_str());
  }
  std::printf("nonce %s\n", env_of("HS_JOB_NONCE").c_str());
  std::fprintf(stderr, "to stderr\n");
  return 10 + std::atoi(env_of("RANK").c_str());
});

const bool kWait = register_worker("wait", [](const std::vector<std::string>&) {
  std::printf("waiting\n");
  std::fflush(stdout);
  if (env_of("RANK") == "0") {
    return 0;
  }
  while (true) {
    pause();
  }
});

std::string line_of(const std::string& text, const std::string& start) {
  const std::size_t begin = text.find(start);
  return begin == std::string::npos ? "" : text.substr(begin, text.find('\n', begin) - begin);
}

TEST(ProcessRanksTest, RanksFindTheirPlaceInTheEnvironment) {
  const Leftovers before = find_leftovers();
  const auto results =
      run_processes(3, "report", {.arguments = {"seven"}, .env = {{"EXTRA", "more"}}});
  ASSERT_EQ(results.size(), 3U);
  std::set<std::string> ports;
  std::set<std::string> nonces;
  for (int rank = 0; rank < 3; ++rank) {
    const RankResult& result = results[static_cast<std::size_t>(rank)];
    EXPECT_EQ(result.status.code, 10 + rank) << to_text(result);
    EXPECT_NE(result.out.find("argument seven\n"), std::string::npos) << to_text(result);
    EXPECT_NE(result.out.find("RANK=" + std::to_string(rank)), std::string::npos);
    EXPECT_NE(result.out.find("WORLD_SIZE=3"), std::string::npos);
    EXPECT_NE(result.out.find("EXTRA=more"), std::string::npos);
    EXPECT_EQ(result.err, "to stderr\n");
    ports.insert(line_of(result.out, "MASTER_PORT="));
    nonces.insert(line_of(result.out, "nonce"));
  }
  EXPECT_EQ(ports.size(), 1U);
  EXPECT_EQ(nonces.size(), 1U);
  EXPECT_NE(*ports.begin(), "MASTER_PORT=unset");
  const auto other = run_processes(1, "report", {.arguments = {"x"}});
  EXPECT_NE(line_of(other[0].out, "nonce"), *nonces.begin());
  EXPECT_EQ(new_leftovers(before), "");
}

TEST(ProcessRanksTest, TheDeadlineKillsWhatStillRuns) {
  const Leftovers before = find_leftovers();
  ::testing::internal::CaptureStderr();
  const auto results = run_processes(2, "wait", {.deadline_s = 5});
  const std::string report = ::testing::internal::GetCapturedStderr();
  EXPECT_TRUE(results[0].status.is_success());
  EXPECT_FALSE(results[0].killed_at_deadline);
  EXPECT_TRUE(results[1].killed_at_deadline);
  EXPECT_EQ(results[1].status.signal, SIGKILL);
  EXPECT_NE(report.find("not done within 5 s, rank 1"), std::string::npos) << report;
  EXPECT_NE(report.find("waiting"), std::string::npos) << report;
  EXPECT_EQ(new_leftovers(before), "");
}

TEST(ProcessRanksTest, ASignalIsSentAfterItsOutput) {
  const auto results = run_processes(
      2, "wait", {.signals = {{.rank = 1, .signal = SIGTERM, .after_output = "waiting"}}}
  );
  EXPECT_EQ(results[1].status.signal, SIGTERM) << to_text(results[1]);
  EXPECT_FALSE(results[1].killed_at_deadline);
}

TEST(ProcessRanksTest, AStoppedRankIsKilledWhenTheOthersHaveEnded) {
  const auto results = run_processes(
      2, "wait", {.signals = {{.rank = 1, .signal = SIGSTOP, .after_output = "waiting"}}}
  );
  EXPECT_TRUE(results[0].status.is_success());
  EXPECT_EQ(results[1].status.signal, SIGKILL);
  EXPECT_FALSE(results[1].killed_at_deadline);
}

}  // namespace
}  // namespace hypershard::testing
