// Why: collectives between threads, which is where the algorithm over shared memory is tested most
// cheaply: every operation, staged and in place, and what goes wrong.
#include "hypershard/comm/local/local_world.h"

#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/Functions.h>

#include "hypershard/comm/collective_cases.h"
#include "hypershard/comm/link.h"
#include "hypershard/core/error.h"
#include "hypershard/testing/run_ranks.h"

namespace hypershard::comm {
namespace {

using testing::run_ranks;

constexpr at::ScalarType kDtypes[] = {
    at::kDouble, at::kFloat, at::kBFloat16, at::kHalf, at::kLong, at::kInt, at::kByte, at::kBool
};

/// Runs `body` on threads over a job with its own options.
void run_job(
    int num_ranks,
    const LocalOptions& options,
    const std::function<void(std::shared_ptr<World>)>& body
) {
  LocalJob job(layout::Topology::single_supernode(num_ranks), options);
  std::vector<std::thread> threads;
  std::vector<std::string> errors(static_cast<std::size_t>(num_ranks));
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(job.world(rank));
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
        job.abort(error.what());
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

/// Staging small enough that everything passes through it in many steps.
constexpr LocalOptions kStaged{
    .timeout_s = 20,
    .reads_any_memory = false,
    .staging_bytes = 24 << 10,
    .step_bytes = 4 << 10,
};

class LocalWorldTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, LocalWorldTest, ::testing::Values(1, 2, 3, 4));

TEST_P(LocalWorldTest, AllOperationsGiveTheClosedForm) {
  run_ranks(GetParam(), [](const std::shared_ptr<World>& world) {
    for (const at::ScalarType dtype : kDtypes) {
      testing_cases::check_all_operations(*world->world_communicator(), dtype);
    }
  });
}

TEST_P(LocalWorldTest, AllOperationsGiveTheClosedFormWhenStaged) {
  run_job(GetParam(), kStaged, [](const std::shared_ptr<World>& world) {
    for (const at::ScalarType dtype : kDtypes) {
      testing_cases::check_all_operations(*world->world_communicator(), dtype);
    }
  });
}

TEST_P(LocalWorldTest, LargeTensorsPassThroughStaging) {
  run_job(
      GetParam(),
      {.timeout_s = 20, .reads_any_memory = false, .staging_bytes = 256 << 10},
      [](const auto& world) { testing_cases::check_large(*world->world_communicator()); }
  );
}

TEST_P(LocalWorldTest, SumsAreInRankOrder) {
  for (const LocalOptions& options : {LocalOptions{}, kStaged}) {
    run_job(GetParam(), options, [](const std::shared_ptr<World>& world) {
      for (int round = 0; round < 5; ++round) {
        testing_cases::check_rank_order(*world->world_communicator());
      }
    });
  }
}

TEST_P(LocalWorldTest, SegmentsWireDtypesAndTrafficGiveTheClosedForm) {
  for (const LocalOptions& options : {LocalOptions{}, kStaged}) {
    run_job(GetParam(), options, [](const std::shared_ptr<World>& world) {
      Communicator& c = *world->world_communicator();
      testing_cases::check_segments(c);
      testing_cases::check_wire_dtype(c);
      testing_cases::check_traffic(c);
      EXPECT_GT(c.stats().busy_ns, 0);
    });
  }
}

TEST_P(LocalWorldTest, SharedMemoryIsSharedAndOrderedByEpochs) {
  for (const LocalOptions& options : {LocalOptions{}, kStaged}) {
    run_job(GetParam(), options, [](const std::shared_ptr<World>& world) {
      testing_cases::check_shared_memory(*world->world_communicator());
    });
  }
}

TEST_P(LocalWorldTest, WaitsWorkOnOtherCommunicators) {
  std::vector<int> ranks(static_cast<std::size_t>(GetParam()));
  std::iota(ranks.begin(), ranks.end(), 0);
  for (const LocalOptions& options : {LocalOptions{}, kStaged}) {
    run_job(GetParam(), options, [&](const std::shared_ptr<World>& world) {
      const auto first = world->communicator("first", ranks);
      const auto second = world->communicator("second", ranks);
      testing_cases::check_waits_work_elsewhere(*first, *second);
      const auto board = first->make_epoch_board(1, "epochs");
      const at::Tensor input = at::ones({3 * world->size()});
      const at::Tensor output = at::empty({3});
      const WorkPtr sum = second->reduce_scatter(output, input);
      if (world->rank() == 0) {
        sum->wait_released();
      }
      board->publish(0, 1);
      board->wait_all(0, 1, "the others", "");
      sum->wait_released();
    });
  }
}

TEST_P(LocalWorldTest, RandomCollectivesInFlightGiveTheClosedForm) {
  for (const LocalOptions& options : {LocalOptions{}, kStaged}) {
    run_job(GetParam(), options, [](const std::shared_ptr<World>& world) {
      testing_cases::check_random(*world->world_communicator(), /*seed=*/11, /*rounds=*/60);
    });
  }
}

TEST_P(LocalWorldTest, MeasuresALinkAlikeOnAllRanks) {
  for (const LocalOptions& options : {LocalOptions{}, kStaged}) {
    run_job(GetParam(), options, [](const std::shared_ptr<World>& world) {
      Communicator& c = *world->world_communicator();
      const LinkSpeed link = measure_link(c);
      const at::Tensor own = at::tensor({link.latency_s, link.bytes_per_s}, at::kDouble);
      at::Tensor largest = own.clone();
      c.all_reduce(largest, ReduceOp::kMax)->wait();
      EXPECT_TRUE(at::equal(own, largest));
      EXPECT_GE(link.latency_s, 0);
      EXPECT_GT(link.bytes_per_s, 0);
    });
  }
}

TEST_P(LocalWorldTest, MoreCallsInFlightThanTheRingHolds) {
  run_ranks(GetParam(), [](const std::shared_ptr<World>& world) {
    Communicator& c = *world->world_communicator();
    std::vector<at::Tensor> tensors;
    std::vector<WorkPtr> works;
    for (int i = 0; i < 700; ++i) {
      tensors.push_back(at::full({3}, i + c.rank(), at::kFloat));
      works.push_back(c.all_reduce(tensors.back()));
    }
    for (int i = 0; i < 700; ++i) {
      works[static_cast<std::size_t>(i)]->wait();
      const int expected = c.size() * i + c.size() * (c.size() - 1) / 2;
      ASSERT_EQ(tensors[static_cast<std::size_t>(i)][2].item<int>(), expected);
    }
  });
}

}  // namespace
}  // namespace hypershard::comm
