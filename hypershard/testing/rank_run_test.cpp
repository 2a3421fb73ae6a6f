// Why: ranks that are processes running the calling test must report what threads would: worlds,
// failed expectations, errors by type, the deadline.
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include <ATen/Functions.h>

#include "hypershard/core/error.h"
#include "hypershard/core/process.h"
#include "hypershard/testing/process_ranks.h"
#include "hypershard/testing/run_ranks.h"

namespace hypershard::testing {
namespace {

RunRanksOptions processes(double deadline_s = 60) {
  return {.backend = RankBackend::kShm, .deadline_s = deadline_s};
}

TEST(RankRunTest, EveryCallRunsOnceInProcessesThatShareMemory) {
  const Leftovers before = find_leftovers();
  for (const int ranks : {1, 3}) {
    run_ranks(
        ranks,
        [&](const std::shared_ptr<comm::World>& world) {
          EXPECT_EQ(world->size(), ranks);
          at::Tensor ones = at::full({2}, 1.0 + world->rank());
          const auto all = world->world_communicator();
          all->all_reduce(ones)->wait();
          EXPECT_EQ(ones[0].item<int>(), ranks * (ranks + 1) / 2);
          if (ranks > 1) {
            EXPECT_NE(all->backend().find("shm"), std::string::npos) << all->backend();
          }
        },
        processes()
    );
  }
  EXPECT_EQ(new_leftovers(before), "");
}

TEST(RankRunTest, SupernodesAreThoseAskedFor) {
  RunRanksOptions options = processes();
  options.supernodes = {"a", "a", "b"};
  run_ranks(
      3,
      [](const std::shared_ptr<comm::World>& world) {
        EXPECT_EQ(world->topology().num_supernodes(), 2);
        EXPECT_EQ(world->topology().supernode_of(2), 1);
      },
      options
  );
}

// Disabled: only the next test runs it.
TEST(RankRunFailureTest, DISABLED_OfRankOne) {
  run_ranks(
      2,
      [](const std::shared_ptr<comm::World>& world) {
        EXPECT_NE(world->rank(), 1) << "seen in rank one";
      },
      processes()
  );
}

TEST(RankRunTest, AFailedExpectationOfARankIsTheTests) {
  SpawnOptions spawn;
  spawn.argv = {
      program_path(),
      "--gtest_also_run_disabled_tests",
      "--gtest_filter=RankRunFailureTest.DISABLED_OfRankOne"
  };
  spawn.out = ChildOutput::kCapture;
  ChildProcess child(spawn);
  EXPECT_EQ(child.wait().code, 1);
  EXPECT_NE(child.captured_out().find("seen in rank one"), std::string::npos)
      << child.captured_out();
}

TEST(RankRunTest, ARepeatedTestCountsItsCallsAgain) {
  SpawnOptions spawn;
  spawn.argv = {
      program_path(),
      "--gtest_repeat=2",
      "--gtest_filter=RankRunTest.EveryCallRunsOnceInProcessesThatShareMemory"
  };
  spawn.out = ChildOutput::kCapture;
  ChildProcess child(spawn);
  EXPECT_EQ(child.wait().code, 0) << child.captured_out();
}

TEST(RankRunTest, AnErrorKeepsItsTypeAndText) {
  std::string text;
  try {
    run_ranks(
        2,
        [](const std::shared_ptr<comm::World>& world) {
          HS_CHECK(world->rank() != 1, "the fault of a test");
          world->world_communicator()->barrier("never")->wait();
        },
        processes()
    );
  } catch (const InvalidArgument& error) {
    text = error.what();
  }
  EXPECT_NE(text.find("the fault of a test"), std::string::npos) << text;
}

TEST(RankRunTest, EndsAtTheDeadline) {
  EXPECT_THROW(
      run_ranks(
          2,
          [](const std::shared_ptr<comm::World>& world) {
            if (world->rank() == 0) {
              std::this_thread::sleep_for(std::chrono::seconds(60));
            }
          },
          processes(/*deadline_s=*/3)
      ),
      CommError
  );
}

}  // namespace
}  // namespace hypershard::testing
