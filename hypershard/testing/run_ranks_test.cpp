// Why: the harness of every distributed test must report the right failure, and end.
#include "hypershard/testing/run_ranks.h"

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include <ATen/Functions.h>

#include "hypershard/core/error.h"

namespace hypershard::testing {
namespace {

template <class Type, class Body>
std::string failure(int num_ranks, Body body, const RunRanksOptions& options = {}) {
  try {
    run_ranks(num_ranks, body, options);
  } catch (const Type& error) {
    return error.what();
  }
  return "no failure";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

class RunRanksTest : public ::testing::TestWithParam<RankBackend> {};
INSTANTIATE_TEST_SUITE_P(
    Backends,
    RunRanksTest,
    ::testing::Values(RankBackend::kLocal, RankBackend::kDelayed),
    [](const auto& backend) { return to_text(backend.param); }
);

TEST_P(RunRanksTest, GivesEveryRankItsWorld) {
  run_ranks(
      3,
      [](const std::shared_ptr<comm::World>& world) {
        at::Tensor ones = at::full({2}, 1.0 + world->rank());
        world->world_communicator()->all_reduce(ones)->wait();
        EXPECT_EQ(ones[0].item<int>(), 6);
        EXPECT_EQ(world->topology().num_supernodes(), 2);
        EXPECT_EQ(error_rank().rank, world->rank());
        world->shutdown();
      },
      {.backend = GetParam(), .supernodes = {"a", "a", "b"}}
  );
}

TEST_P(RunRanksTest, RethrowsTheFirstFailureAndFreesTheOthers) {
  const std::string text = failure<InvalidArgument>(
      3,
      [](const std::shared_ptr<comm::World>& world) {
        const auto c = world->world_communicator();
        c->barrier()->wait();
        HS_CHECK(world->rank() != 1, "the fault of a test");
        c->barrier("never")->wait();
      },
      {.backend = GetParam(), .timeout_s = 60}
  );
  EXPECT_TRUE(contains(text, "[rank 1/3] the fault of a test")) << text;
  EXPECT_TRUE(contains(text, "also failed, rank 0")) << text;
  EXPECT_TRUE(contains(text, "also failed, rank 2")) << text;
}

TEST_P(RunRanksTest, EndsAtTheDeadlineAndTellsWhereEachRankStood) {
  const std::string text = failure<CommError>(
      2,
      [](const std::shared_ptr<comm::World>& world) {
        const auto c = world->world_communicator();
        c->barrier("first")->wait();
        if (world->rank() == 1) {
          c->barrier("second")->wait();
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1500));
      },
      {.backend = GetParam(), .deadline_s = 0.3, .timeout_s = 60}
  );
  EXPECT_TRUE(contains(text, "not done within 0.3 s")) << text;
  EXPECT_TRUE(contains(text, "rank 0: barrier #0 for unit 'first'")) << text;
  EXPECT_TRUE(contains(text, "rank 1: barrier #1 for unit 'second'")) << text;
}

TEST(RunRanksTest, PassesOnFailuresOfOtherTypes) {
  const std::string text =
      failure<std::out_of_range>(2, [](const std::shared_ptr<comm::World>& world) {
        if (world->rank() == 0) {
          throw std::out_of_range("not ours");  // raw-throw: what a test body may do
        }
      });
  EXPECT_EQ(text, "not ours");
}

TEST(RunRanksTest, ARankThatReturnsEarlyIsNotWaitedFor) {
  const std::string text = failure<CommError>(2, [](const std::shared_ptr<comm::World>& world) {
    const auto c = world->world_communicator();
    c->barrier()->wait();
    if (world->rank() == 0) {
      c->barrier("missing")->wait();
    }
  });
  EXPECT_TRUE(contains(text, "rank 1 (global 1) left")) << text;
  EXPECT_TRUE(contains(text, "barrier #1 for unit 'missing' on 'world'")) << text;
}

TEST(RunRanksTest, RefusesLabelsThatDoNotFit) {
  EXPECT_THROW(
      run_ranks(2, [](const std::shared_ptr<comm::World>&) {}, {.supernodes = {"a"}}),
      InvalidArgument
  );
  EXPECT_THROW(run_ranks(0, [](const std::shared_ptr<comm::World>&) {}), InvalidArgument);
}

}  // namespace
}  // namespace hypershard::testing
