// Why: a launcher that leaks a child, a zombie or a half-started rank spoils the host it runs on.
// Children here are /bin/sh or this binary again as a worker.
#include "hypershard/core/process.h"

#include <arpa/inet.h>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <functional>
#include <netinet/in.h>
#include <stdexcept>
#include <string>
#include <sys/socket.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "hypershard/core/error.h"
#include "hypershard/testing/worker.h"

namespace hypershard {
namespace {

constexpr std::int64_t kPatienceMs = 30'000;  // only a hang ever waits this long

SpawnOptions shell(const std::string& script) {
  return {.argv = {"sh", "-c", script}, .out = ChildOutput::kCapture, .err = ChildOutput::kCapture};
}

SpawnOptions worker(const std::string& name) {
  return {.argv = {program_path(), "--worker", name}, .out = ChildOutput::kCapture};
}

bool eventually(const std::function<bool()>& holds) {
  for (std::int64_t waited_ms = 0; waited_ms < kPatienceMs; waited_ms += 2) {
    if (holds()) {
      return true;
    }
    usleep(2000);
  }
  return false;
}

/// Tells whether a process runs; a zombie, which only init can reap, does not.
bool is_running(int pid) {
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(stat, text);
  const std::size_t name_end = text.rfind(')');
  return name_end != std::string::npos && text.at(name_end + 2) != 'Z';
}

ExitStatus wait_within(ChildProcess& child) {
  const auto status = child.wait_for(kPatienceMs);
  return status.has_value() ? *status : throw std::runtime_error("the child hangs");
}

TEST(ProcessTest, CapturesOutputAndExitCode) {
  ChildProcess child(shell("echo out; echo err >&2; exit 3"));
  const ExitStatus status = wait_within(child);
  EXPECT_EQ(to_text(status), "exit code 3");
  EXPECT_FALSE(status.is_success());
  EXPECT_EQ(child.captured_out(), "out\n");
  EXPECT_EQ(child.captured_err(), "err\n");
}

TEST(ProcessTest, CapturesMoreThanAPipeHolds) {
  ChildProcess child(shell("head -c 300000 /dev/zero"));
  EXPECT_TRUE(wait_within(child).is_success());
  EXPECT_EQ(child.captured_out().size(), 300'000U);
}

TEST(ProcessTest, SendsErrorsToAGivenDescriptor) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  SpawnOptions options = shell("echo err >&2");
  options.err_fd = ends[1];
  ChildProcess child(options);
  EXPECT_TRUE(wait_within(child).is_success());
  char buffer[8] = {};
  EXPECT_EQ(read(ends[0], buffer, sizeof(buffer)), 4);
  EXPECT_STREQ(buffer, "err\n");
  close(ends[0]);
  close(ends[1]);
}

TEST(ProcessTest, PassesEnvironmentAndFolder) {
  setenv("CORE_TEST_KEPT", "kept", 1);
  setenv("CORE_TEST_REMOVED", "removed", 1);
  SpawnOptions options = shell("echo $CORE_TEST_KEPT,$CORE_TEST_REMOVED,$CORE_TEST_ADDED; pwd");
  options.env = {{"CORE_TEST_ADDED", "a=b c"}};
  options.unset_env = {"CORE_TEST_REMOVED"};
  options.folder = "/";
  ChildProcess child(options);
  EXPECT_TRUE(wait_within(child).is_success());
  EXPECT_EQ(child.captured_out(), "kept,,a=b c\n/\n");
}

TEST(ProcessTest, ReportsWhatCannotBeStarted) {
  const auto error_of = [](const SpawnOptions& options) -> std::string {
    try {
      const ChildProcess child(options);
    } catch (const IoError& error) {
      return error.what_brief();
    }
    return "";
  };
  EXPECT_NE(
      error_of({.argv = {"no-such-program-here"}}
      ).find("no program 'no-such-program-here' in PATH"),
      std::string::npos
  );
  EXPECT_EQ(
      error_of({.argv = {"/no/such/file"}}),
      "process: cannot start '/no/such/file': cannot execute: No such file or directory (errno 2)"
  );
  EXPECT_NE(
      error_of({.argv = {"/bin/sh"}, .folder = "/no/such/folder"})
          .find("cannot change to the folder (in '/no/such/folder')"),
      std::string::npos
  );
  EXPECT_THROW(ChildProcess(SpawnOptions{}), InvalidArgument);
}

TEST(ProcessTest, DeathBySignalIsTold) {
  ChildProcess child(shell("kill -9 $$"));
  const ExitStatus status = wait_within(child);
  EXPECT_EQ(to_text(status), "signal 9 (Killed)");
  EXPECT_FALSE(status.is_success());
}

TEST(ProcessTest, WaitGivesUpWhileTheChildRuns) {
  ChildProcess child(shell("exec sleep 1000"));
  EXPECT_EQ(child.wait_for(5), std::nullopt);
  EXPECT_EQ(child.poll(), std::nullopt);
  child.signal(SIGTERM);
  EXPECT_EQ(wait_within(child).signal, SIGTERM);
  child.signal(SIGTERM);  // after the end: nothing happens
  EXPECT_EQ(wait_within(child).signal, SIGTERM);
}

TEST(ProcessTest, DestructorKillsAndReaps) {
  int pid = 0;
  try {
    ChildProcess child(shell("exec sleep 1000"));
    pid = child.pid();
    EXPECT_TRUE(is_running(pid));
    throw std::runtime_error("unwinding");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(kill(pid, 0), -1) << "the child is neither gone nor reaped";
}

TEST(ProcessTest, AssignmentEndsTheFormerChild) {
  ChildProcess child(shell("exec sleep 1000"));
  const int first = child.pid();
  child = ChildProcess(shell("exit 0"));
  EXPECT_EQ(kill(first, 0), -1);
  EXPECT_TRUE(wait_within(child).is_success());
}

TEST(ProcessTest, GrandchildrenOfTheGroupEndWithTheChild) {
  ChildProcess child(shell("sleep 1000 & echo $!"));
  EXPECT_TRUE(wait_within(child).is_success());
  const int grandchild = std::stoi(child.captured_out());
  EXPECT_TRUE(eventually([&] { return !is_running(grandchild); }));
}

TEST(ProcessTest, SignalsReachTheWholeGroup) {
  ChildProcess child(shell("sleep 1000 & echo $!; wait"));
  ASSERT_TRUE(eventually([&] { return child.captured_out().ends_with('\n'); }));
  const int grandchild = std::stoi(child.captured_out());
  child.signal_group(SIGTERM);
  EXPECT_EQ(wait_within(child).signal, SIGTERM);
  EXPECT_TRUE(eventually([&] { return !is_running(grandchild); }));
}

TEST(ProcessTest, ChildHasDefaultHandlersAndNoBlockedSignals) {
  std::signal(SIGPIPE, SIG_IGN);
  ChildProcess child(SpawnOptions{
      .argv = {"grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"}, .out = ChildOutput::kCapture
  });
  EXPECT_TRUE(wait_within(child).is_success());
  std::signal(SIGPIPE, SIG_DFL);
  std::string masks;
  for (const char c : child.captured_out()) {
    masks += c == '0' || c == '\t' || c == '\n' ? "" : std::string(1, c);
  }
  EXPECT_EQ(masks, "SigBlk:SigIgn:");
}

// Spawns a child that would live long, says its number, and waits to be killed.
const bool kParentRegistered =
    testing::register_worker("process_parent", [](const std::vector<std::string>&) {
      ChildProcess child(SpawnOptions{.argv = {"sleep", "1000"}});
      std::printf("%d\n", child.pid());
      std::fflush(stdout);
      child.wait();
      return 0;
    });

TEST(ProcessTest, ChildDiesWithAKilledParent) {
  ASSERT_TRUE(kParentRegistered);
  ChildProcess parent(worker("process_parent"));
  ASSERT_TRUE(eventually([&] { return parent.captured_out().ends_with('\n'); }));
  const int grandchild = std::stoi(parent.captured_out());
  ASSERT_TRUE(is_running(grandchild));
  parent.signal(SIGKILL);
  EXPECT_EQ(wait_within(parent).signal, SIGKILL);
  // The grandchild has a group of its own: only the death signal can have ended it.
  EXPECT_TRUE(eventually([&] { return !is_running(grandchild); }));
}

const bool kStopperRegistered =
    testing::register_worker("process_stopper", [](const std::vector<std::string>& arguments) {
      const bool obeys = arguments.empty();
      install_stop_signals();
      std::puts("ready");
      std::fflush(stdout);
      while (!stop_requested()) {
        usleep(1000);
      }
      std::printf("stopped by %d\n", stop_signal());
      std::fflush(stdout);
      while (!obeys) {
        usleep(1000);
      }
      return 0;
    });

TEST(ProcessTest, StopSignalSetsTheFlag) {
  ASSERT_TRUE(kStopperRegistered);
  ChildProcess child(worker("process_stopper"));
  ASSERT_TRUE(eventually([&] { return child.captured_out() == "ready\n"; }));
  child.signal(SIGTERM);
  EXPECT_TRUE(wait_within(child).is_success());
  EXPECT_EQ(child.captured_out(), "ready\nstopped by 15\n");
}

TEST(ProcessTest, HangupStopsUnlessItIsIgnored) {
  for (const bool is_ignored : {false, true}) {
    SpawnOptions options = worker("process_stopper");
    if (is_ignored) {
      options.argv = {
          "/bin/sh", "-c", "trap '' HUP; exec " + program_path() + " --worker process_stopper"
      };
    }
    ChildProcess child(options);
    ASSERT_TRUE(eventually([&] { return child.captured_out() == "ready\n"; }));
    child.signal(SIGHUP);
    if (is_ignored) {
      child.signal(SIGTERM);
    }
    EXPECT_TRUE(wait_within(child).is_success());
    EXPECT_EQ(
        child.captured_out(), is_ignored ? "ready\nstopped by 15\n" : "ready\nstopped by 1\n"
    );
  }
}

TEST(ProcessTest, SecondStopSignalEndsTheProcess) {
  SpawnOptions options = worker("process_stopper");
  options.argv.emplace_back("ignore");
  ChildProcess child(options);
  ASSERT_TRUE(eventually([&] { return child.captured_out() == "ready\n"; }));
  child.signal(SIGINT);
  ASSERT_TRUE(eventually([&] { return child.captured_out().ends_with("stopped by 2\n"); }));
  child.signal(SIGINT);
  EXPECT_EQ(wait_within(child).signal, SIGINT);
}

TEST(ProcessTest, StopCanBeRequestedAndCleared) {
  EXPECT_FALSE(stop_requested());
  request_stop(SIGINT);
  EXPECT_TRUE(stop_requested());
  EXPECT_EQ(stop_signal(), SIGINT);
  request_stop(0);
  EXPECT_FALSE(stop_requested());
}

TEST(ProcessTest, HostIsTheSameForParentAndChild) {
  ChildProcess child(
      shell("cat /proc/sys/kernel/random/boot_id; stat -Lc %i /proc/self/ns/net; uname -n")
  );
  EXPECT_TRUE(wait_within(child).is_success());
  EXPECT_EQ(
      child.captured_out(),
      concat_text(boot_id(), "\n", network_namespace(), "\n", host_name(), "\n")
  );
}

TEST(ProcessTest, CoresAreThoseOfTheAffinityMask) {
  ChildProcess child(shell("unset OMP_NUM_THREADS OMP_THREAD_LIMIT; nproc"));
  EXPECT_TRUE(wait_within(child).is_success());
  EXPECT_EQ(child.captured_out(), concat_text(available_cores(), "\n"));
}

TEST(ProcessTest, FreePortCanBeBound) {
  const int port = free_loopback_port();
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0) << port;
  close(fd);
}

}  // namespace
}  // namespace hypershard
