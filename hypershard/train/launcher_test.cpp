// Checks what the launcher promises about ranks that end, fail, die or do not want to end, with
// shell scripts as ranks.
#include "hypershard/train/launcher.h"

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "hypershard/core/clock.h"
#include "hypershard/core/error.h"
#include "hypershard/core/process.h"
#include "hypershard/testing/worker.h"
#include "hypershard/train/internal/rank_process.h"

namespace hypershard::train {
namespace {

namespace fs = std::filesystem;

class LauncherTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("hs_launcher_" + std::to_string(::getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  LaunchOptions shell(int num_ranks, const std::string& script) const {
    LaunchOptions options;
    options.num_ranks = num_ranks;
    options.command = {"/bin/sh", "-c", script};
    options.environment = {{"FOLDER", folder_.string()}};
    options.grace_s = 0.2;
    options.terminate_s = 0.2;
    return options;
  }
  std::string content(const std::string& name) const {
    std::ifstream file(folder_ / name);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }

  fs::path folder_;
};

// Waits until a process that is not our child is gone; its new parent may leave a zombie.
bool ends_soon(int pid) {
  const double deadline = now_s() + 10;
  while (now_s() < deadline) {
    std::ifstream status("/proc/" + std::to_string(pid) + "/stat");
    std::string text;
    std::getline(status, text);
    if (text.empty() || text.find(") Z") != std::string::npos) {
      return true;
    }
    ::usleep(10'000);
  }
  return false;
}

TEST_F(LauncherTest, TellsEachRankItsPlace) {
  const LaunchResult result = launch_ranks(shell(
      3,
      "echo \"$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR\" > $FOLDER/$RANK; "
      "echo $MASTER_PORT $HS_JOB_NONCE > $FOLDER/job$RANK"
  ));
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.report, "");
  EXPECT_EQ(result.ends.size(), 3U);
  EXPECT_EQ(content("2"), "2/3 2/3 127.0.0.1\n");
  EXPECT_EQ(content("job0"), content("job2"));
  EXPECT_GT(content("job0").size(), 10U);
}

TEST_F(LauncherTest, TwoJobsHaveDifferentNonces) {
  launch_ranks(shell(1, "echo $HS_JOB_NONCE > $FOLDER/first"));
  launch_ranks(shell(1, "echo $HS_JOB_NONCE > $FOLDER/second"));
  EXPECT_NE(content("first"), content("second"));
}

TEST_F(LauncherTest, FirstFailureGivesTheExitCode) {
  const LaunchResult result =
      launch_ranks(shell(2, "if [ $RANK = 1 ]; then exit 4; fi; sleep 0.1; exit 3"));
  EXPECT_EQ(result.exit_code, 4);
  EXPECT_NE(result.report.find("rank 1 exited with code 4 (internal error)"), std::string::npos)
      << result.report;
  EXPECT_NE(result.report.find("then rank 0 exited with code 3"), std::string::npos)
      << result.report;
}

TEST_F(LauncherTest, LossOfAPeerIsNotTheCause) {
  const LaunchResult result =
      launch_ranks(shell(2, "if [ $RANK = 0 ]; then exit 3; fi; sleep 0.1; exit 2"));
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.report.find("rank 1 exited with code 2 (bad input)"), std::string::npos)
      << result.report;
}

TEST_F(LauncherTest, KilledRankIsNamedWithItsLastWords) {
  const LaunchResult result = launch_ranks(
      shell(2, "if [ $RANK = 1 ]; then echo farewell >&2; kill -9 $$; fi; sleep 0.1; exit 3")
  );
  EXPECT_EQ(result.exit_code, kExitCommunication);
  EXPECT_NE(result.report.find("rank 1 was killed by signal 9 (Killed)"), std::string::npos)
      << result.report;
  EXPECT_NE(result.report.find("farewell"), std::string::npos) << result.report;
}

TEST_F(LauncherTest, StubbornRankIsKilledAfterTheGrace) {
  const LaunchResult result = launch_ranks(shell(
      2,
      "if [ $RANK = 1 ]; then exit 2; fi; trap '' TERM; echo $$ > $FOLDER/pid; "
      "while true; do sleep 0.05; done"
  ));
  EXPECT_EQ(result.exit_code, 2);
  ASSERT_EQ(result.ends.size(), 2U);
  EXPECT_EQ(result.ends[1].signal, SIGKILL);
  EXPECT_TRUE(result.ends[1].by_launcher);
  EXPECT_NE(::kill(std::atoi(content("pid").c_str()), 0), 0) << "rank 0 is still there";
}

TEST_F(LauncherTest, WhatARankStartedGoesWithIt) {
  launch_ranks(shell(
      2, "if [ $RANK = 1 ]; then sleep 0.1; exit 2; fi; sleep 1000 & echo $! > $FOLDER/pid; wait"
  ));
  const int pid = std::atoi(content("pid").c_str());
  ASSERT_GT(pid, 0);
  EXPECT_TRUE(ends_soon(pid));
}

TEST_F(LauncherTest, RanksThatFailAlikeNeedNoReport) {
  const LaunchResult result = launch_ranks(shell(2, "exit 2"));
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.report, "");
}

TEST_F(LauncherTest, StderrIsKeptOnceTheFolderExists) {
  LaunchOptions options = shell(1, "echo early >&2; sleep 0.1; mkdir $FOLDER/run; echo late >&2");
  options.log_path = (folder_ / "run" / "log").string();
  launch_ranks(options);
  EXPECT_EQ(content("run/log"), "early\nlate\n");
}

TEST_F(LauncherTest, InterruptReachesEveryRankOnce) {
  // This thread must not be the one that gets the signal.
  sigset_t stop{};
  sigemptyset(&stop);
  sigaddset(&stop, SIGINT);
  std::thread sender([this, stop] {
    pthread_sigmask(SIG_BLOCK, &stop, nullptr);
    for (int rank = 0; rank < 2; ++rank) {
      while (!fs::exists(folder_ / ("ready" + std::to_string(rank)))) {
        ::usleep(10'000);
      }
    }
    ::kill(::getpid(), SIGINT);
  });
  const LaunchResult result = launch_ranks(shell(
      2,
      "trap 'echo stop >> $FOLDER/seen$RANK; exit 130' INT; touch $FOLDER/ready$RANK; "
      "while true; do sleep 0.02; done"
  ));
  sender.join();
  EXPECT_EQ(result.exit_code, kExitInterrupted);
  EXPECT_EQ(result.report, "");
  EXPECT_EQ(content("seen0"), "stop\n");
  EXPECT_EQ(content("seen1"), "stop\n");
}

TEST_F(LauncherTest, HangupThatIsIgnoredReachesNoRank) {
  const auto before = std::signal(SIGHUP, SIG_IGN);
  std::thread sender([this] {
    while (!fs::exists(folder_ / "ready")) {
      ::usleep(10'000);
    }
    ::kill(::getpid(), SIGHUP);
  });
  const LaunchResult result = launch_ranks(shell(1, "touch $FOLDER/ready; sleep 0.3"));
  sender.join();
  std::signal(SIGHUP, before);
  EXPECT_EQ(result.exit_code, kExitOk);
  ASSERT_EQ(result.ends.size(), 1U);
  EXPECT_EQ(result.ends[0].signal, 0);
}

TEST_F(LauncherTest, ProgramThatDoesNotExistIsAnIoError) {
  LaunchOptions options;
  options.command = {"/nonexistent/program"};
  try {
    launch_ranks(options);
    FAIL() << "no error";
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find("/nonexistent/program"), std::string::npos)
        << error.what();
  }
}

TEST_F(LauncherTest, RanksGetCoresOfTheirOwnIfThereAreEnough) {
  const std::vector<internal::CoreSet> sets = internal::split_cores(1);
  ASSERT_EQ(sets.size(), 1U);
  EXPECT_EQ(sets[0].size(), static_cast<std::size_t>(available_cores()));
  EXPECT_TRUE(internal::split_cores(available_cores() + 1).empty());
}

// A rank that says who it is and waits to die.
const bool kFollowerRegistered =
    testing::register_worker("follower", [](const std::vector<std::string>& arguments) {
      std::ofstream(arguments.at(0)) << ::getpid() << std::endl;
      ::sleep(1000);
      return 0;
    });
const bool kLauncherRegistered =
    testing::register_worker("launcher", [](const std::vector<std::string>& arguments) {
      LaunchOptions options;
      options.command = {"/proc/self/exe", "--worker", "follower", arguments.at(0)};
      return launch_ranks(options).exit_code;
    });

TEST_F(LauncherTest, RankDiesWithItsLauncher) {
  ASSERT_TRUE(kFollowerRegistered && kLauncherRegistered);
  const std::string pid_file = (folder_ / "follower").string();
  ChildProcess launcher({.argv = {program_path(), "--worker", "launcher", pid_file}});
  while (content("follower").find('\n') == std::string::npos) {
    ::usleep(10'000);
  }
  const int follower = std::atoi(content("follower").c_str());
  launcher.signal(SIGKILL);
  launcher.wait();
  EXPECT_TRUE(ends_soon(follower)) << "process " << follower << " outlived its launcher";
}

}  // namespace
}  // namespace hypershard::train
