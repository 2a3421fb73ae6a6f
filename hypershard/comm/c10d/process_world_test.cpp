// Jobs of real processes: joining, two supernodes on one host, clean ends, and what the survivors
// say when a rank is killed, stopped or throws. Heartbeats are fast so that the tests are.
#include "hypershard/comm/c10d/process_world.h"

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/Functions.h>

#include "hypershard/comm/c10d/internal/network.h"
#include "hypershard/comm/collective_cases.h"
#include "hypershard/core/clock.h"
#include "hypershard/core/error.h"
#include "hypershard/core/process.h"
#include "hypershard/testing/process_ranks.h"
#include "hypershard/testing/worker.h"

namespace hypershard::comm {
namespace {

using testing::find_leftovers;
using testing::Leftovers;
using testing::new_leftovers;
using testing::ProcessOptions;
using testing::RankResult;
using testing::register_worker;
using testing::run_processes;

constexpr int kCommFailed = 3;

void say(const std::string& text) {
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

// Pretends that the ranks of one host are supernodes of `size` ranks each.
void emulate_supernodes(const std::string& size) {
  const int rank = std::atoi(std::getenv("RANK"));
  if (size != "0") {
    ::setenv("HS_SUPERNODE", std::to_string(rank / std::atoi(size.c_str())).c_str(), 1);
  }
}

// Runs `body` and turns its errors into a message and a status, as the program does.
template <class Body>
int guarded(const Body& body) {
  std::shared_ptr<World> world;
  try {
    world = World::join();
    body(*world);
    world->shutdown();
    return 0;
  } catch (const Error& error) {
    if (world != nullptr) {
      report_failure(*world, error.what_brief());
    }
    say(error.what());
    return error.code() == ErrorCode::kComm ? kCommFailed : 2;
  }
}

// arguments: ranks a supernode (0: as they are)
const bool kJoin = register_worker("join", [](const std::vector<std::string>& arguments) {
  emulate_supernodes(arguments.at(0));
  return guarded([](World& world) {
    say(world.description());
    const auto all = world.world_communicator();
    say("world over " + all->backend());
    testing_cases::check_all_operations(*all, at::kFloat);
    testing_cases::check_random(*all, 5, 20);
    const layout::Topology& topology = world.topology();
    const auto& neighbours = topology.ranks_of(topology.supernode_of(world.rank()));
    say("supernode over " + world.communicator("shard", neighbours)->backend());
    say("local rank " + std::to_string(launch_info(world).local_rank));
  });
});

// arguments: ranks a supernode, unit that says "started" (the signal comes then), rank that throws
// (or -1)
const bool kTrain = register_worker("train", [](const std::vector<std::string>& arguments) {
  emulate_supernodes(arguments.at(0));
  return guarded([&](World& world) {
    const auto all = world.world_communicator();
    at::Tensor gradient = at::ones({std::atoll(arguments.at(2).c_str())});
    const Stopwatch stopwatch;
    bool has_said = false;
    for (int step = 0;; ++step) {
      const std::string unit = "blocks." + std::to_string(step % 4);
      all->all_reduce(gradient, ReduceOp::kMax, unit)->wait();
      if (!has_said && step >= 2 && stopwatch.elapsed_s() > 0.6) {
        say("started");
        has_said = true;
      }
      HS_CHECK(
          step != 40 || world.rank() != std::atoi(arguments.at(1).c_str()),
          "train: the loss is NaN at step ",
          step
      );
    }
  });
});

// Reduces buckets of three uneven units each until a signal comes.
const bool kBuckets = register_worker("buckets", [](const std::vector<std::string>& arguments) {
  emulate_supernodes(arguments.at(0));
  return guarded([&](World& world) {
    const auto all = world.world_communicator();
    std::vector<ReduceSegment> bucket;
    for (const std::int64_t numel : {40'000, 7, 3'000'000}) {
      std::vector<std::int64_t> counts(static_cast<std::size_t>(world.size()), numel);
      counts.front() += 11;
      bucket.push_back(
          {at::empty({counts[static_cast<std::size_t>(world.rank())]}),
           at::ones({numel * world.size() + 11}),
           counts}
      );
    }
    const Stopwatch stopwatch;
    for (int step = 0; stopwatch.elapsed_s() < 100; ++step) {
      all->reduce_scatter(bucket, {ReduceOp::kSum, 1, at::kBFloat16}, "bucket 1")->wait();
      if (step == 3) {
        say("started");
      }
    }
  });
});

// Rank 2 was told another back end.
const bool kOddBackEnd = register_worker("odd_back_end", [](const std::vector<std::string>&) {
  ::setenv("HS_COMM", std::string(std::getenv("RANK")) == "2" ? "c10d" : "auto", 1);
  return guarded([](World& world) { world.world_communicator()->barrier()->wait(); });
});

// Rank 1 fails before it has met the others anywhere but in the store.
const bool kEarly = register_worker("early", [](const std::vector<std::string>&) {
  return guarded([](World& world) {
    HS_CHECK(world.rank() != 1, "early: no data");
    world.world_communicator()->barrier()->wait();
  });
});

// Waits in a collective that rank 1 never starts.
const bool kAbsent = register_worker("absent", [](const std::vector<std::string>&) {
  return guarded([](World& world) {
    const auto all = world.world_communicator();
    all->barrier("warm-up")->wait();
    if (world.rank() == 1) {
      say("started");
      std::this_thread::sleep_for(std::chrono::seconds(600));
    }
    at::Tensor tensor = at::ones({2'000'000});
    all->all_reduce(tensor, ReduceOp::kSum, "blocks.9")->wait();
  });
});

// Joins and leaves many times in one process, as tests and notebooks do.
const bool kCycles = register_worker("cycles", [](const std::vector<std::string>& arguments) {
  LaunchInfo info = parse_launch_env(process_environment());
  for (int cycle = 0; cycle < std::atoi(arguments.at(0).c_str()); ++cycle) {
    info.restart_count = cycle;
    const auto world = join_world(info);
    at::Tensor tensor = at::ones({100'000});
    world->world_communicator()->all_reduce(tensor)->wait();
    HS_CHECK_EQ(tensor[0].item<float>(), static_cast<float>(world->size()));
    world->shutdown();
  }
  say("done");
  return 0;
});

const std::vector<std::pair<std::string, std::string>> kFast = {
    {"HS_HEARTBEAT_MS", "200"}, {"HS_TIMEOUT_S", "8"}, {"HS_LOG_LEVEL", "warn"}
};

ProcessOptions options_of(
    std::vector<std::string> arguments,
    const std::vector<std::pair<std::string, std::string>>& env = {}
) {
  ProcessOptions options;
  options.arguments = std::move(arguments);
  options.env = kFast;
  options.env.insert(options.env.end(), env.begin(), env.end());
  options.deadline_s = 100;
  return options;
}

void expect_contains(const RankResult& result, const std::vector<std::string>& fragments) {
  for (const std::string& fragment : fragments) {
    EXPECT_NE(result.out.find(fragment), std::string::npos)
        << "no '" << fragment << "' in: " << to_text(result);
  }
}

void expect_success(const std::vector<RankResult>& results) {
  for (const RankResult& result : results) {
    EXPECT_EQ(result.status.code, 0) << to_text(result);
    EXPECT_EQ(result.err, "") << to_text(result);
  }
}

class ProcessWorldTest : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_EQ(new_leftovers(before_), ""); }

 private:
  Leftovers before_ = find_leftovers();
};

TEST_F(ProcessWorldTest, RanksOfAHostFormOneSupernode) {
  const auto results = run_processes(3, "join", options_of({"0"}));
  expect_success(results);
  for (int rank = 0; rank < 3; ++rank) {
    expect_contains(
        results[static_cast<std::size_t>(rank)],
        {"rank " + std::to_string(rank) + " of 3 (started by hypershard)",
         "1 supernode: [0, 1, 2]",
         "world over shm",
         "local rank " + std::to_string(rank)}
    );
  }
}

TEST_F(ProcessWorldTest, StatedSupernodesTalkOverGloo) {
  const auto results = run_processes(4, "join", options_of({"2"}));
  expect_success(results);
  for (const RankResult& result : results) {
    expect_contains(
        result, {"2 supernodes: [0, 1], [2, 3]", "world over c10d:gloo", "supernode over shm"}
    );
  }
}

TEST_F(ProcessWorldTest, GlooCanReplaceSharedMemory) {
  const auto results = run_processes(2, "join", options_of({"0"}, {{"HS_COMM", "c10d"}}));
  expect_success(results);
  expect_contains(results[0], {"world over c10d:gloo", "supernode over c10d:gloo"});
}

TEST_F(ProcessWorldTest, SharedMemoryAcrossSupernodesIsAnError) {
  const auto results = run_processes(2, "join", options_of({"1"}, {{"HS_COMM", "shm"}}));
  for (const RankResult& result : results) {
    EXPECT_EQ(result.status.code, 2) << to_text(result);
    expect_contains(
        result, {"'world' over ranks [0, 1] crosses supernodes", "HS_COMM=auto takes shared memory"}
    );
  }
}

// Nobody waits for the timeout.
TEST_F(ProcessWorldTest, DifferentBackEndsAreAnErrorThatNamesBothRanks) {
  const auto results = run_processes(3, "odd_back_end", options_of({}, {{"HS_TIMEOUT_S", "60"}}));
  for (const RankResult& result : results) {
    EXPECT_EQ(result.status.code, 2) << to_text(result);
    EXPECT_LT(result.seconds, 30);
    expect_contains(result, {"rank 0 has auto, rank 2 has c10d", "HS_COMM"});
  }
}

TEST_F(ProcessWorldTest, StartsAndStopsFiftyTimes) {
  expect_success(run_processes(2, "cycles", options_of({"50"}, {{"HS_COMM", "c10d"}})));
}

// What every survivor of rank `dead` must say.
void expect_survivors_blame(
    const std::vector<RankResult>& results,
    int dead,
    const std::string& op = "all_reduce #",
    const std::string& unit = "of unit 'blocks."
) {
  const std::string name = "rank " + std::to_string(dead);
  for (int rank = 0; rank < static_cast<int>(results.size()); ++rank) {
    const RankResult& result = results[static_cast<std::size_t>(rank)];
    if (rank == dead) {
      continue;
    }
    EXPECT_EQ(result.status.code, kCommFailed) << to_text(result);
    EXPECT_FALSE(result.killed_at_deadline) << to_text(result);
    expect_contains(result, {name, op, unit, "on axis 'world'"});
  }
}

TEST_F(ProcessWorldTest, AKilledRankIsNamed) {
  ProcessOptions options = options_of({"1", "-1", "200000"});
  options.signals = {{.rank = 1, .signal = SIGKILL, .after_output = "started"}};
  const auto results = run_processes(3, "train", options);
  expect_survivors_blame(results, 1);
  expect_contains(
      results[0], {"rank 1 died (no sign of life for", "its last known collective was"}
  );
}

// Gloo does not tell whoever waits for the rest of a message that its sender is gone.
TEST_F(ProcessWorldTest, ARankKilledInTheMiddleOfAMessageIsNamed) {
  ProcessOptions options = options_of({"1", "-1", "20000000"}, {{"HS_TIMEOUT_S", "60"}});
  options.signals = {{.rank = 1, .signal = SIGKILL, .after_output = "started"}};
  const auto results = run_processes(3, "train", options);
  expect_survivors_blame(results, 1);
}

TEST_F(ProcessWorldTest, ARankKilledInTheMiddleOfABucketIsNamed) {
  ProcessOptions options = options_of({"1"}, {{"HS_TIMEOUT_S", "60"}});
  options.signals = {{.rank = 1, .signal = SIGKILL, .after_output = "started"}};
  const auto results = run_processes(3, "buckets", options);
  expect_survivors_blame(results, 1, "reduce_scatter #", "of unit 'bucket 1'");
}

TEST_F(ProcessWorldTest, AKilledHostOfTheStoreIsNamed) {
  ProcessOptions options = options_of({"1", "-1", "200000"});
  options.signals = {{.rank = 0, .signal = SIGKILL, .after_output = "started"}};
  const auto results = run_processes(3, "train", options);
  expect_survivors_blame(results, 0);
  expect_contains(results[1], {"rank 0 (which hosts the job's store) is gone"});
}

TEST_F(ProcessWorldTest, AStoppedRankIsNamed) {
  ProcessOptions options = options_of({"1", "-1", "200000"});
  options.signals = {{.rank = 1, .signal = SIGSTOP, .after_output = "started"}};
  const auto results = run_processes(3, "train", options);
  expect_survivors_blame(results, 1);
  expect_contains(results[0], {"rank 1 has died or is stopped (no sign of life for"});
}

TEST_F(ProcessWorldTest, AStoppedHostOfTheStoreIsNamed) {
  ProcessOptions options = options_of({"1", "-1", "200000"});
  options.signals = {{.rank = 0, .signal = SIGSTOP, .after_output = "started"}};
  const auto results = run_processes(3, "train", options);
  expect_survivors_blame(results, 0);
  expect_contains(results[1], {"rank 0 (which hosts the job's store) does not answer"});
}

TEST_F(ProcessWorldTest, ARankThatThrowsIsTheRootCause) {
  const auto results = run_processes(3, "train", options_of({"1", "2", "200000"}));
  EXPECT_EQ(results[2].status.code, 2) << to_text(results[2]);
  expect_survivors_blame(results, 2);
  for (int rank = 0; rank < 2; ++rank) {
    expect_contains(
        results[static_cast<std::size_t>(rank)],
        {"rank 2 failed first", "the loss is NaN at step 40"}
    );
  }
}

// Nobody waits until the timeout for a rank that is known not to come.
TEST_F(ProcessWorldTest, ARankThatFailsBeforeItsFirstCollectiveIsTheRootCause) {
  for (const char* back_end : {"shm", "c10d"}) {
    const auto results =
        run_processes(3, "early", options_of({}, {{"HS_COMM", back_end}, {"HS_TIMEOUT_S", "60"}}));
    EXPECT_EQ(results[1].status.code, 2) << to_text(results[1]);
    for (const int rank : {0, 2}) {
      const RankResult& result = results[static_cast<std::size_t>(rank)];
      EXPECT_EQ(result.status.code, kCommFailed) << to_text(result);
      EXPECT_LT(result.seconds, 30) << back_end;
      expect_contains(result, {"rank 1 failed first", "early: no data", "'world'"});
    }
  }
}

TEST_F(ProcessWorldTest, ARankThatStaysAwayIsNamedAtTheTimeout) {
  ProcessOptions options = options_of({}, {{"HS_COMM", "c10d"}, {"HS_TIMEOUT_S", "2"}});
  // Changes nothing for rank 1, but has it ended once the others have.
  options.signals = {{.rank = 1, .signal = SIGCONT, .after_output = "started"}};
  const auto results = run_processes(3, "absent", options);
  for (const int rank : {0, 2}) {
    const RankResult& result = results[static_cast<std::size_t>(rank)];
    EXPECT_EQ(result.status.code, kCommFailed) << to_text(result);
    expect_contains(
        result,
        {"all_reduce #1 of unit 'blocks.9' on axis 'world'",
         "rank 1 lags: its last known collective was barrier #0 of unit 'warm-up'"}
    );
  }
}

// In this process, without peers.

std::string join_text(const LaunchInfo& info, double timeout_s) {
  try {
    join_world(info, {.timeout_s = timeout_s});
  } catch (const Error& error) {
    set_error_rank(-1, 0);
    return error.what();
  }
  set_error_rank(-1, 0);
  return "nothing was thrown";
}

LaunchInfo two_ranks(int rank, int port) {
  LaunchInfo info;
  info.launcher = Launcher::kTorchrun;
  info.rank = rank;
  info.world_size = 2;
  info.master_addr = "127.0.0.1";
  info.master_port = port;
  return info;
}

TEST(JoinWorldTest, ARankAloneNeedsNoStore) {
  const auto world = join_world(LaunchInfo());
  EXPECT_EQ(world->size(), 1);
  at::Tensor tensor = at::ones({4});
  world->world_communicator()->all_reduce(tensor)->wait();
  EXPECT_EQ(tensor[3].item<float>(), 1.0f);
  world->shutdown();
  set_error_rank(-1, 0);
}

TEST(JoinWorldTest, NamesTheRanksThatDoNotCome) {
  const std::string text = join_text(two_ranks(0, free_loopback_port()), 1);
  EXPECT_NE(text.find("ranks [1] of 2 did not join the job within 1 s"), std::string::npos) << text;
}

TEST(JoinWorldTest, NamesTheAddressNobodyServes) {
  const int port = free_loopback_port();
  const std::string text = join_text(two_ranks(1, port), 1);
  EXPECT_NE(
      text.find("nobody serves the job's store at 127.0.0.1:" + std::to_string(port)),
      std::string::npos
  ) << text;
  EXPECT_NE(text.find("Connection refused"), std::string::npos) << text;
}

// As a stopped rank 0 does: the kernel accepts, and nobody answers.
TEST(JoinWorldTest, GivesUpOnAStoreThatDoesNotAnswer) {
  const int port = free_loopback_port();
  const int fd = internal::listen_on("127.0.0.1", port);
  const std::string text = join_text(two_ranks(1, port), 0.5);
  EXPECT_NE(text.find("accepts connections but has not answered"), std::string::npos) << text;
  EXPECT_NE(text.find("is rank 0, which hosts it, stopped?"), std::string::npos) << text;
  ::close(fd);
}

TEST(JoinWorldTest, NamesAnAddressThatRankZeroDoesNotHave) {
  LaunchInfo info = two_ranks(0, free_loopback_port());
  info.master_addr = "no-such-host.invalid";
  const std::string text = join_text(info, 0.5);
  EXPECT_NE(text.find("no-such-host.invalid"), std::string::npos) << text;
  EXPECT_NE(text.find("nobody serves the job's store"), std::string::npos) << text;
}

TEST(JoinWorldTest, AllRanksLearnWhoDoesNotCome) {
  LaunchInfo first = two_ranks(0, free_loopback_port());
  first.world_size = 3;
  LaunchInfo second = first;
  second.rank = 1;
  std::string host_text;
  std::thread host([&] { host_text = join_text(first, 1); });
  const std::string text = join_text(second, 20);  // its own patience is longer
  host.join();
  EXPECT_NE(host_text.find("ranks [2] of 3 did not join"), std::string::npos) << host_text;
  EXPECT_NE(text.find("ranks [2] of 3 did not join"), std::string::npos) << text;
}

TEST(JoinWorldTest, NamesAPortThatIsTaken) {
  const int port = free_loopback_port();
  const int fd = internal::listen_on("127.0.0.1", port);
  const std::string text = join_text(two_ranks(0, port), 1);
  EXPECT_NE(text.find("127.0.0.1:" + std::to_string(port)), std::string::npos) << text;
  EXPECT_NE(text.find("set MASTER_PORT to a free one"), std::string::npos) << text;
  ::close(fd);
}

TEST(JoinWorldTest, RefusesToJoinAnotherJob) {
  LaunchInfo first = two_ranks(0, free_loopback_port());
  LaunchInfo second = first;
  first.run_id = "monday";
  second.rank = 1;
  second.run_id = "tuesday";
  std::string host_text;
  std::thread host([&] { host_text = join_text(first, 3); });
  const std::string text = join_text(second, 10);
  host.join();
  EXPECT_NE(text.find("serves another job: job 'monday of 2 ranks'"), std::string::npos) << text;
  EXPECT_NE(text.find("'tuesday of 2 ranks'"), std::string::npos) << text;
}

TEST(NetworkTest, KnowsTheLoopbackInterface) {
  EXPECT_TRUE(internal::is_loopback("127.0.0.1"));
  EXPECT_TRUE(internal::is_loopback("localhost"));
  EXPECT_FALSE(internal::is_loopback("192.0.2.1"));
  EXPECT_EQ(internal::local_address_towards("127.0.0.1", 80), "127.0.0.1");
}

TEST(NetworkTest, NoncesDiffer) {
  EXPECT_EQ(internal::random_nonce().size(), 32u);
  EXPECT_NE(internal::random_nonce(), internal::random_nonce());
}

}  // namespace
}  // namespace hypershard::comm
