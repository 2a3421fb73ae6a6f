// Why: of a fused reduction over messages, what the caller cannot see in its result: which bytes
// travel, what is copied on the way, how long the link is busy, and what is said when ranks differ.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/Functions.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "hypershard/comm/c10d/gloo_communicator.h"
#include "hypershard/comm/c10d/health.h"
#include "hypershard/comm/c10d/internal/message_communicator.h"
#include "hypershard/comm/collective_cases.h"
#include "hypershard/core/clock.h"
#include "hypershard/core/error.h"

namespace hypershard::comm {
namespace {

GroupInfo group_of(int rank, int num_ranks) {
  GroupInfo info;
  info.name = "replicate";
  info.rank = rank;
  info.timeout_s = 60;
  for (int i = 0; i < num_ranks; ++i) {
    info.global_ranks.push_back(i);
  }
  return info;
}

/// Runs `body` on threads, each with a communicator over Gloo, and reports what they throw.
void run_threads(
    int num_ranks, const std::function<void(Communicator&)>& body, double heartbeat_s = 0
) {
  const auto rendezvous = Rendezvous::in_process();
  std::vector<std::string> errors(static_cast<std::size_t>(num_ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        GlooOptions options;
        if (heartbeat_s > 0) {
          const HealthOptions health{
              .rank = rank, .world_size = num_ranks, .heartbeat_s = heartbeat_s
          };
          options.health = std::make_shared<Health>(rendezvous->store(), health);
        }
        const auto c =
            make_gloo_communicator(group_of(rank, num_ranks), rendezvous->store(), "test", options);
        body(*c);
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const std::string& error : errors) {
    EXPECT_EQ(error, "");
  }
}

// The counters are arithmetic; these are the messages.
TEST(MessageReductionsTest, SendsTheBytesThatAreCounted) {
  run_threads(3, [](Communicator& c) {
    const auto& message = dynamic_cast<const internal::MessageCommunicator&>(c);
    testing_cases::check_segments(c);
    testing_cases::check_wire_dtype(c);
    for (const std::int64_t numel : {1, 1000, 65'537, 2'000'001}) {
      at::Tensor tensor = at::ones({numel});
      c.all_reduce(tensor)->wait();
      for (int root = 0; root < 3; ++root) {
        c.broadcast(tensor, root)->wait();
      }
    }
    const std::vector<std::int64_t> counts = {100, 0, 700'000};
    at::Tensor slice = at::ones({counts[static_cast<std::size_t>(c.rank())]});
    at::Tensor whole = at::empty({700'100});
    c.all_gather(whole, slice, counts)->wait();
    // A barrier of three ranks is two messages of a byte from each; there were two.
    EXPECT_EQ(message.engine().sent_bytes(), c.stats().sent_bytes + 4);
  });
}

TEST(MessageReductionsTest, IsBusyWhileSomethingIsInFlight) {
  run_threads(2, [](Communicator& c) {
    c.barrier()->wait();
    c.barrier()->wait();
    const std::int64_t before = c.stats().busy_ns;
    constexpr std::int64_t kLateNs = 30'000'000;
    if (c.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::nanoseconds(kLateNs));
      EXPECT_LT(c.stats().busy_ns - before, kLateNs) << "nothing is in flight here";
    }
    at::Tensor tensor = at::ones({10});
    c.all_reduce(tensor)->wait();
    if (c.rank() == 0) {
      EXPECT_GT(c.stats().busy_ns - before, kLateNs / 2);
    }
    c.barrier()->wait();
  });
}

// How late the other one was is read off its own clock: no rank leaves a barrier at the same time.
TEST(MessageReductionsTest, WaitsAsLongAsTheOtherRankIsLate) {
  constexpr std::int64_t kLateNs = 100'000'000;
  constexpr std::int64_t kSlackNs = 20'000'000;  // a thread may lose its core before it waits
  std::atomic<std::int64_t> woke_ns = 0;
  run_threads(2, [&](Communicator& c) {
    c.barrier()->wait();
    at::Tensor tensor = at::ones({10});
    if (c.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::nanoseconds(kLateNs));
      woke_ns = now_ns();
    }
    const std::int64_t before = c.stats().wait_ns;
    const std::int64_t began_ns = now_ns();
    c.all_reduce(tensor)->wait();
    if (c.rank() == 0) {
      EXPECT_GE(c.stats().wait_ns - before, woke_ns - began_ns - kSlackNs);
    }
    c.barrier()->wait();
  });
}

// What is rounded or joined is made by the communicator, not by the caller; what is large goes out
// from where it lies.
TEST(MessageReductionsTest, StagesOfABucketOnlyWhatItMust) {
  run_threads(2, [](Communicator& c) {
    const std::vector<ReduceSegment> bucket = {
        {at::empty({500'000}), at::ones({1'000'000})},
        {at::empty({10}), at::ones({20})},
        {at::empty({20}), at::ones({40})},
        {at::empty({500'000}), at::ones({1'000'000})}
    };
    c.reduce_scatter(bucket)->wait();
    const std::int64_t arriving = 4 * 1'000'030;
    EXPECT_EQ(c.stats().staged_bytes, arriving + 4 * 30);
    c.barrier()->wait();
  });
}

TEST(MessageReductionsTest, DifferentCountsOfASegmentAreNamed) {
  const auto differ = [](Communicator& c) {
    const std::int64_t own = c.rank() == 0 ? 40 : 60;
    const std::vector<ReduceSegment> bucket = {
        {at::empty({8}), at::ones({16})}, {at::empty({own}), at::ones({100}), {40, 60}}
    };
    std::vector<ReduceSegment> other = bucket;
    other[1].counts = {60, 40};
    other[1].output = at::empty({40});
    const WorkPtr work =
        c.reduce_scatter(c.rank() == 0 ? bucket : other, ReduceOp::kSum, "bucket 2");
    std::string text = "nothing was thrown";
    try {
      work->wait();
    } catch (const CommError& error) {
      text = error.what();
    }
    EXPECT_TRUE(
        text.find("the ranks call different collectives") != std::string::npos ||
        text.find("failed first") != std::string::npos
    ) << text;
    EXPECT_NE(text.find("of unit 'bucket 2'"), std::string::npos) << text;
    EXPECT_NE(text.find("2 segments [8, 8] [40, 60]"), std::string::npos) << text;
    EXPECT_NE(text.find("2 segments [8, 8] [60, 40]"), std::string::npos) << text;
  };
  run_threads(2, differ, /*heartbeat_s=*/0.1);
}

}  // namespace
}  // namespace hypershard::comm
