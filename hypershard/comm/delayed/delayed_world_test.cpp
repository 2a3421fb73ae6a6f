// Why: the wrapper is itself a test: it must give right results late, poison early reads, catch
// early writes, and repeat its order for a seed.
#include "hypershard/comm/delayed/delayed_world.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/Functions.h>

#include "hypershard/comm/collective_cases.h"
#include "hypershard/core/error.h"
#include "hypershard/testing/run_ranks.h"

namespace hypershard::comm {
namespace {

using testing::RankBackend;
using testing::run_ranks;

constexpr testing::RunRanksOptions kDelayed{.backend = RankBackend::kDelayed, .seed = 7};

class DelayedWorldTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, DelayedWorldTest, ::testing::Values(1, 2, 3, 4));

TEST_P(DelayedWorldTest, AllOperationsGiveTheClosedForm) {
  run_ranks(
      GetParam(),
      [](const std::shared_ptr<World>& world) {
        Communicator& c = *world->world_communicator();
        EXPECT_FALSE(c.has_shared_memory());
        testing_cases::check_all_operations(c, at::kFloat);
        testing_cases::check_all_operations(c, at::kInt);
        testing_cases::check_rank_order(c);
        testing_cases::check_random(c, /*seed=*/3, /*rounds=*/40);
        testing_cases::check_segments(c);
        testing_cases::check_wire_dtype(c);
        testing_cases::check_traffic(c);
      },
      kDelayed
  );
}

TEST(DelayedWorldTest, OutputsAreNaNUntilTheWait) {
  run_ranks(
      2,
      [](const std::shared_ptr<World>& world) {
        Communicator& c = *world->world_communicator();
        at::Tensor whole = at::full({8}, 5.0);
        at::Tensor slice = whole.narrow(0, 4 * c.rank(), 4);
        const WorkPtr gather = c.all_gather(whole, slice);
        EXPECT_TRUE(at::isnan(whole.narrow(0, 4 * (1 - c.rank()), 4)).all().item<bool>());
        EXPECT_EQ(slice.sum().item<int>(), 20) << "the part that is input stays readable";
        gather->wait();
        EXPECT_EQ(whole.sum().item<int>(), 40);
        const WorkPtr reduce = c.all_reduce(whole);
        EXPECT_TRUE(at::isnan(whole).all().item<bool>());
        reduce->wait();
        EXPECT_EQ(whole.sum().item<int>(), 80);
      },
      kDelayed
  );
}

TEST(DelayedWorldTest, EverySegmentIsNaNUntilTheWaitAndWatched) {
  run_ranks(
      2,
      [](const std::shared_ptr<World>& world) {
        Communicator& c = *world->world_communicator();
        at::Tensor whole = at::ones({8});
        at::Tensor input = at::ones({2});
        at::Tensor output = at::ones({1});
        const std::vector<ReduceSegment> segments = {
            {whole.narrow(0, 4 * c.rank(), 4), whole}, {output, input}
        };
        const WorkPtr work = c.reduce_scatter(segments);
        EXPECT_EQ(at::isnan(whole).sum().item<int>(), 4);
        EXPECT_TRUE(at::isnan(output).all().item<bool>());
        work->wait();
        EXPECT_EQ(whole.sum().item<int>(), 4 + 8);
        EXPECT_EQ(output.item<int>(), 2);
        const WorkPtr spoiled = c.reduce_scatter(segments, ReduceOp::kSum, "bucket 3");
        input.fill_(2);
        try {
          spoiled->wait();
          ADD_FAILURE() << "no error";
        } catch (const InvalidArgument& error) {
          EXPECT_NE(std::string(error.what()).find("'bucket 3'"), std::string::npos);
        }
      },
      kDelayed
  );
}

TEST(DelayedWorldTest, CatchesAnInputThatIsWrittenTooEarly) {
  try {
    run_ranks(
        2,
        [](const std::shared_ptr<World>& world) {
          Communicator& c = *world->world_communicator();
          at::Tensor input = at::ones({8});
          at::Tensor output = at::ones({4});
          const WorkPtr work = c.reduce_scatter(output, input, {}, ReduceOp::kSum, "blocks.1");
          input.fill_(2);
          work->wait();
        },
        kDelayed
    );
    FAIL() << "no error";
  } catch (const InvalidArgument& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("reduce_scatter #0 for unit 'blocks.1'"), std::string::npos) << text;
    EXPECT_NE(text.find("written to before"), std::string::npos) << text;
  }
}

TEST(DelayedWorldTest, TestAnswersTrueInTheEnd) {
  run_ranks(
      2,
      [](const std::shared_ptr<World>& world) {
        Communicator& c = *world->world_communicator();
        at::Tensor tensor = at::ones({4});
        const WorkPtr work = c.all_reduce(tensor);
        while (!work->test()) {
        }
        EXPECT_EQ(tensor.sum().item<int>(), 8);
      },
      kDelayed
  );
}

// What is in flight beside the awaited work may depend on what this rank does next.
TEST(DelayedWorldTest, NoWaitNeedsAnotherWorksPeers) {
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    run_ranks(
        2,
        [](const std::shared_ptr<World>& world) {
          const auto first = world->communicator("first", {0, 1});
          const auto late = world->communicator("late", {0, 1});
          const auto signal = world->communicator("signal", {0, 1});
          at::Tensor a = at::ones({2});
          at::Tensor b = at::ones({2});
          const WorkPtr awaited = first->all_reduce(a);
          WorkPtr beside = world->rank() == 0 ? late->all_reduce(b) : nullptr;
          awaited->wait();
          signal->barrier()->wait();
          beside = beside == nullptr ? late->all_reduce(b) : beside;
          beside->wait();
          EXPECT_EQ(b.sum().item<int>(), 4);
        },
        {.backend = RankBackend::kDelayed, .timeout_s = 5, .seed = seed}
    );
  }
}

/// Returns which of `num_lanes` communicators had their work complete when each was waited for.
std::string completion_order(std::uint64_t seed) {
  std::string order;
  run_ranks(
      2,
      [&](const std::shared_ptr<World>& world) {
        std::vector<at::Tensor> tensors;
        std::vector<WorkPtr> works;
        for (int round = 0; round < 4; ++round) {
          for (int lane = 0; lane < 5; ++lane) {
            const auto c = world->communicator("lane" + std::to_string(lane), {0, 1});
            tensors.push_back(at::ones({2}));
            works.push_back(c->all_reduce(tensors.back()));
          }
        }
        for (std::size_t i = 0; i < works.size(); i += 3) {
          works[i]->wait();
          if (world->rank() == 0) {
            for (const at::Tensor& tensor : tensors) {
              order += at::isnan(tensor).any().item<bool>() ? '.' : 'x';
            }
            order += '\n';
          }
        }
        for (const WorkPtr& work : works) {
          work->wait();
        }
      },
      {.backend = RankBackend::kDelayed, .seed = seed}
  );
  return order;
}

TEST(DelayedWorldTest, TheSeedDecidesTheOrder) {
  const std::string first = completion_order(1);
  EXPECT_EQ(completion_order(1), first);
  EXPECT_NE(completion_order(2), first);
}

}  // namespace
}  // namespace hypershard::comm
