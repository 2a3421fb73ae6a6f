// Why: what only real processes show: mappings of one memory at different addresses, sockets,
// death and stalls, and that nothing is left behind. The workers run in copies of this binary.
#include "hypershard/comm/shm/shm_communicator.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/Functions.h>

#include "hypershard/comm/collective_cases.h"
#include "hypershard/core/error.h"
#include "hypershard/testing/process_ranks.h"
#include "hypershard/testing/worker.h"

namespace hypershard::comm {
namespace {

using testing::ProcessOptions;
using testing::RankResult;
using testing::register_worker;
using testing::run_processes;

constexpr at::ScalarType kDtypes[] = {
    at::kDouble, at::kFloat, at::kBFloat16, at::kHalf, at::kLong, at::kInt, at::kByte, at::kBool
};

int env_int(const char* name) {
  return std::atoi(std::getenv(name));
}

GroupInfo group_of(int rank, int size, double timeout_s) {
  GroupInfo info;
  info.name = "shard";
  info.rank = rank;
  info.timeout_s = timeout_s;
  for (int i = 0; i < size; ++i) {
    info.global_ranks.push_back(10 + i);
  }
  return info;
}

std::shared_ptr<Communicator> join(double timeout_s = 20, const ShmRendezvous& sizes = {}) {
  set_error_rank(env_int("RANK"), env_int("WORLD_SIZE"));
  ShmRendezvous rendezvous = sizes;
  rendezvous.nonce = std::getenv("HS_JOB_NONCE");
  return make_shm_communicator(
      group_of(env_int("RANK"), env_int("WORLD_SIZE"), timeout_s), rendezvous
  );
}

void say(const std::string& text) {
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

/// Runs `body`, prints the CommError it must throw, and returns the exit code.
int expect_comm_error(const std::function<void()>& body) {
  try {
    body();
  } catch (const CommError& error) {
    say("CommError: " + error.what_brief());
    return 0;
  }
  say("no error");
  return 1;
}

void expect_all_good(const std::vector<RankResult>& results) {
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    EXPECT_TRUE(results[rank].status.is_success())
        << "rank " << rank << ": " << to_text(results[rank]);
  }
}

bool has(const RankResult& result, const std::string& text) {
  return result.out.find(text) != std::string::npos;
}

// -- operations

const bool kAllOps = register_worker("shm_all_ops", [](const std::vector<std::string>&) {
  const auto c = join();
  for (const at::ScalarType dtype : kDtypes) {
    testing_cases::check_all_operations(*c, dtype);
  }
  testing_cases::check_large(*c);
  testing_cases::check_rank_order(*c);
  testing_cases::check_shared_memory(*c);
  testing_cases::check_random(*c, /*seed=*/5, /*rounds=*/40);
  testing_cases::check_segments(*c);
  testing_cases::check_wire_dtype(*c);
  testing_cases::check_traffic(*c);
  return 0;
});

const bool kTinySteps = register_worker("shm_tiny_steps", [](const std::vector<std::string>&) {
  const auto c = join(20, {.nonce = "", .staging_bytes = 24 << 10, .step_bytes = 4 << 10});
  for (const at::ScalarType dtype : kDtypes) {
    testing_cases::check_all_operations(*c, dtype);
  }
  testing_cases::check_rank_order(*c);
  testing_cases::check_random(*c, /*seed=*/6, /*rounds=*/60);
  return 0;
});

class ShmCommunicatorTest : public ::testing::TestWithParam<int> {
 protected:
  void TearDown() override { EXPECT_EQ(testing::new_leftovers(before_), ""); }

 private:
  testing::Leftovers before_ = testing::find_leftovers();
};
INSTANTIATE_TEST_SUITE_P(Ranks, ShmCommunicatorTest, ::testing::Values(1, 2, 3, 4));

TEST_P(ShmCommunicatorTest, AllOperationsGiveTheClosedForm) {
  expect_all_good(run_processes(GetParam(), "shm_all_ops"));
}

TEST_P(ShmCommunicatorTest, SmallStagingGivesTheSame) {
  expect_all_good(run_processes(GetParam(), "shm_tiny_steps"));
}

// -- faults

class ShmFaultTest : public ShmCommunicatorTest {};
INSTANTIATE_TEST_SUITE_P(Ranks, ShmFaultTest, ::testing::Values(3));

const bool kMismatch = register_worker("shm_mismatch", [](const std::vector<std::string>&) {
  const auto c = join();
  at::Tensor tensor = at::ones({12});
  c->barrier()->wait();
  return expect_comm_error([&] {
    if (c->rank() == 1) {
      c->all_reduce(tensor, ReduceOp::kSum, "blocks.4")->wait();
    } else {
      c->broadcast(tensor, 1, "blocks.3")->wait();
      c->barrier()->wait();
    }
    c->barrier()->wait();
  });
});

TEST_P(ShmFaultTest, DifferentCallsNameBothRanksAndCalls) {
  const auto results = run_processes(GetParam(), "shm_mismatch");
  expect_all_good(results);
  for (const RankResult& result : results) {
    EXPECT_TRUE(has(result, "the ranks' calls differ")) << to_text(result);
    EXPECT_TRUE(has(result, "broadcast #1 for unit 'blocks.3'")) << to_text(result);
    EXPECT_TRUE(has(result, "all_reduce #1 for unit 'blocks.4'")) << to_text(result);
    EXPECT_TRUE(has(result, "rank 1 (global 11)")) << to_text(result);
  }
}

const bool kSegmentMismatch = register_worker("shm_segment_mismatch", [](const auto& arguments) {
  const auto c = join();
  c->barrier()->wait();
  const bool odd = c->rank() == 1;
  std::vector<ReduceSegment> bucket = {
      {at::empty({4}), at::ones({12})}, {at::empty({4}), at::ones({12})}
  };
  if (odd && arguments.at(0) == "counts") {
    bucket[1] = {at::empty({5}), at::ones({12}), {3, 5, 4}};
  } else if (odd) {
    bucket.push_back({at::empty({1}), at::ones({3})});
  }
  return expect_comm_error([&] {
    c->reduce_scatter(bucket, ReduceOp::kSum, "bucket 7")->wait();
    c->barrier()->wait();
  });
});

TEST_P(ShmFaultTest, DifferentCountsOfASegmentNameBothRanks) {
  const auto results = run_processes(GetParam(), "shm_segment_mismatch", {.arguments = {"counts"}});
  expect_all_good(results);
  for (const RankResult& result : results) {
    EXPECT_TRUE(has(result, "rank 1 (global 11)")) << to_text(result);
    EXPECT_TRUE(has(result, "unit 'bucket 7 (2 of 2)'")) << to_text(result);
    EXPECT_TRUE(has(result, "counts [4, 4, 4]")) << to_text(result);
    EXPECT_TRUE(has(result, "counts [3, 5, 4]")) << to_text(result);
  }
}

TEST_P(ShmFaultTest, DifferentNumbersOfSegmentsNameBothRanks) {
  const auto results = run_processes(GetParam(), "shm_segment_mismatch", {.arguments = {"more"}});
  expect_all_good(results);
  for (const RankResult& result : results) {
    EXPECT_TRUE(has(result, "rank 1 (global 11)")) << to_text(result);
    EXPECT_TRUE(has(result, "unit 'bucket 7 (1 of 2)'")) << to_text(result);
    EXPECT_TRUE(has(result, "unit 'bucket 7 (1 of 3)'")) << to_text(result);
  }
}

const bool kDie = register_worker("shm_die", [](const std::vector<std::string>& arguments) {
  ShmRendezvous rendezvous;
  rendezvous.watch_stall = [](const std::string& during) {
    return [during] { return "rank 99 is cut off during " + during; };
  };
  const auto c = join(/*timeout_s=*/arguments.empty() ? 30 : std::stod(arguments[0]), rendezvous);
  at::Tensor input = at::ones({3000});
  at::Tensor output = at::ones({1000});
  c->all_reduce(input, ReduceOp::kSum, "blocks.2")->wait();
  if (c->rank() == 1) {
    say("ready");
    while (true) {
      pause();
    }
  }
  return expect_comm_error([&] {
    c->reduce_scatter(output, input, {}, ReduceOp::kSum, "blocks.3")->wait();
  });
});

TEST_P(ShmFaultTest, DeathIsSeenAtOnceAndNamed) {
  const auto results = run_processes(
      GetParam(), "shm_die", {.signals = {{.rank = 1, .signal = SIGKILL, .after_output = "ready"}}}
  );
  for (const int rank : {0, 2}) {
    const RankResult& result = results[static_cast<std::size_t>(rank)];
    EXPECT_TRUE(result.status.is_success()) << to_text(result);
    EXPECT_TRUE(has(result, "rank 1 (global 11) died")) << to_text(result);
    EXPECT_TRUE(has(result, "reduce_scatter #1 for unit 'blocks.3' on 'shard'")) << to_text(result);
    EXPECT_TRUE(has(result, "its last collective was all_reduce #0 (unit 'blocks.2')"))
        << to_text(result);
    EXPECT_FALSE(has(result, "within")) << "the time-out ran out: " << to_text(result);
  }
}

TEST_P(ShmFaultTest, StallEndsInATimeOutThatNamesTheRank) {
  const auto results = run_processes(
      GetParam(),
      "shm_die",
      {.arguments = {"6"}, .signals = {{.rank = 1, .signal = SIGSTOP, .after_output = "ready"}}}
  );
  for (const int rank : {0, 2}) {
    const RankResult& result = results[static_cast<std::size_t>(rank)];
    EXPECT_TRUE(result.status.is_success()) << to_text(result);
    EXPECT_TRUE(has(
        result,
        "rank 1 (global 11) has not joined reduce_scatter #1 for unit 'blocks.3' on 'shard' within "
        "6 s; its last collective was all_reduce #0 (unit 'blocks.2'); rank 99 is cut off during "
        "reduce_scatter #1 for unit 'blocks.3' on 'shard'"
    )) << to_text(result);
  }
}

const bool kLeave = register_worker("shm_leave", [](const std::vector<std::string>&) {
  auto c = join(/*timeout_s=*/30);
  c->barrier()->wait();
  if (c->rank() == 1) {
    c.reset();  // as an exception's unwinding does
    return 0;
  }
  return expect_comm_error([&] { c->barrier("end")->wait(); });
});

TEST_P(ShmFaultTest, ARankThatLeavesIsNotWaitedFor) {
  const auto results = run_processes(GetParam(), "shm_leave");
  expect_all_good(results);
  EXPECT_TRUE(has(results[0], "rank 1 (global 11) left")) << to_text(results[0]);
  EXPECT_TRUE(has(results[2], "rank 1 (global 11) left")) << to_text(results[2]);
}

const bool kDieInBoard = register_worker("shm_die_in_board", [](const std::vector<std::string>&) {
  const auto c = join(/*timeout_s=*/30);
  const auto board = c->make_epoch_board(2, "release epochs");
  if (c->rank() == 1) {
    say("ready");
    while (true) {
      pause();
    }
  }
  board->publish(1, 7);
  return expect_comm_error([&] { board->wait_all(1, 7, "readers", "blocks.5"); });
});

TEST_P(ShmFaultTest, DeathEndsTheWaitForAnEpoch) {
  const auto results = run_processes(
      GetParam(),
      "shm_die_in_board",
      {.signals = {{.rank = 1, .signal = SIGKILL, .after_output = "ready"}}}
  );
  for (const int rank : {0, 2}) {
    const RankResult& result = results[static_cast<std::size_t>(rank)];
    EXPECT_TRUE(result.status.is_success()) << to_text(result);
    EXPECT_TRUE(has(result, "rank 1 (global 11) died")) << to_text(result);
    EXPECT_TRUE(has(result, "epoch 7 of readers for unit 'blocks.5'")) << to_text(result);
  }
}

const bool kAbsent = register_worker("shm_absent", [](const std::vector<std::string>&) {
  if (env_int("RANK") == 1) {
    return 0;
  }
  return expect_comm_error([] { join(/*timeout_s=*/1); });
});

TEST_P(ShmFaultTest, RanksThatDoNotComeAreNamed) {
  const auto results = run_processes(GetParam(), "shm_absent");
  expect_all_good(results);
  for (const int rank : {0, 2}) {
    const RankResult& result = results[static_cast<std::size_t>(rank)];
    EXPECT_TRUE(has(result, "rank 1 (global 11)")) << to_text(result);
  }
}

const bool kDieInAllocation = register_worker("shm_die_in_allocation", [](const auto&) {
  const auto c = join(/*timeout_s=*/30);
  c->barrier()->wait();
  if (c->rank() == 1) {
    raise(SIGKILL);
  }
  return expect_comm_error([&] { c->allocate_shared(1 << 20, "blocks.0 runtime"); });
});

TEST_P(ShmFaultTest, DeathInAnAllocationIsNamed) {
  const auto results = run_processes(GetParam(), "shm_die_in_allocation");
  for (const int rank : {0, 2}) {
    const RankResult& result = results[static_cast<std::size_t>(rank)];
    EXPECT_TRUE(result.status.is_success()) << to_text(result);
    EXPECT_TRUE(has(result, "rank 1 (global 11) died")) << to_text(result);
    EXPECT_TRUE(has(result, "blocks.0 runtime")) << to_text(result);
  }
}

const bool kAskDifferently = register_worker("shm_ask_differently", [](const auto&) {
  const auto c = join(/*timeout_s=*/30);
  return expect_comm_error([&] { c->allocate_shared(c->rank() == 1 ? 100 : 200, "a buffer"); });
});

TEST_P(ShmFaultTest, DifferentAllocationsFailOnAllRanks) {
  const auto results = run_processes(GetParam(), "shm_ask_differently");
  expect_all_good(results);
  for (const RankResult& result : results) {
    EXPECT_TRUE(has(result, "100 bytes for a buffer")) << to_text(result);
    EXPECT_TRUE(has(result, "200 bytes for a buffer")) << to_text(result);
  }
}

const bool kTooMuch = register_worker("shm_too_much", [](const std::vector<std::string>&) {
  const auto c = join(/*timeout_s=*/30);
  return expect_comm_error([&] { c->allocate_shared(std::int64_t{1} << 50, "a petabyte"); });
});

TEST_P(ShmFaultTest, MemoryThatIsNotThereIsAnErrorOnAllRanks) {
  const auto results = run_processes(GetParam(), "shm_too_much");
  expect_all_good(results);
  for (const RankResult& result : results) {
    EXPECT_TRUE(has(result, "a petabyte")) << to_text(result);
    EXPECT_TRUE(has(result, "bytes available")) << to_text(result);
  }
}

const bool kStrayWrite = register_worker("shm_stray_write", [](const std::vector<std::string>&) {
  const auto c = join(/*timeout_s=*/30);
  const auto buffer = c->allocate_shared(4096, "parameters");
  say("allocated");
  *const_cast<std::byte*>(buffer->read()) = std::byte{1};
  say("wrote");
  return 0;
});

TEST(ShmBufferTest, AWriteThroughTheReadOnlyMappingFaults) {
  const auto results = run_processes(2, "shm_stray_write");
  for (const RankResult& result : results) {
    EXPECT_TRUE(has(result, "allocated")) << to_text(result);
    EXPECT_FALSE(has(result, "wrote")) << to_text(result);
  }
}

// -- ranks need not be processes

TEST(ShmBufferTest, AGroupMayBeJoinedAgainOnceItIsGone) {
  for (int round = 0; round < 3; ++round) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([rank] {
        const std::string nonce = "again-" + std::to_string(getpid());
        const auto c = make_shm_communicator(group_of(rank, 2, 20), {.nonce = nonce});
        testing_cases::check_all_operations(*c, at::kFloat);
        testing_cases::check_shared_memory(*c);
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
}

TEST(ShmBufferTest, AnEmptyNonceIsRefused) {
  EXPECT_THROW(make_shm_communicator(group_of(0, 1, 1), {}), InvalidArgument);
}

}  // namespace
}  // namespace hypershard::comm
