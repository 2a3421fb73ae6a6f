// When what is reduced over two tiers: the pipeline behind backward never waits for a peer too
// early, keeps its order and its bits whoever is late, and holds no more memory for more layers.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <ATen/ATen.h>

#include "hypershard/core/trace.h"
#include "hypershard/shard/test_probed_net.h"
#include "hypershard/shard/test_two_tier.h"

namespace hypershard::shard::test {
namespace {

using layout::Strategy;
using testing::RankBackend;

std::string name_of(const ::testing::TestParamInfo<RankBackend>& info) {
  return testing::to_text(info.param);
}

class TwoTierScheduleTest : public ::testing::TestWithParam<RankBackend> {};
INSTANTIATE_TEST_SUITE_P(
    Backends, TwoTierScheduleTest, ::testing::ValuesIn(all_backends()), name_of
);

/// Two of a ProbedNet's blocks fill a bucket, on 2x2.
constexpr std::int64_t kTwoBlocks = 2000;

TEST_P(TwoTierScheduleTest, CollectivesComeInTheSameOrderOnAllRanks) {
  testing::run_ranks(
      4,
      [](const std::shared_ptr<comm::World>& world) {
        for (const std::int64_t bucket_bytes :
             {layout::kBucketOfOne, kTwoBlocks, layout::kBucketOfAll}) {
          // Shuffled memory order: other modules are built between the ranks' models.
          std::vector<Net> noise(static_cast<std::size_t>(world->rank()));
          ProbedNet model(6);
          RandomSleep sleep(world->rank());
          *model->visit = [&](int) { sleep.pass(300); };
          *model->visit_backward = *model->visit;
          const ShardedModel sharded = fully_shard(
              *model, make_mesh(world, 2), tier_options(Strategy::kHierarchical, bucket_bytes)
          );
          torch::optim::SGD optimizer(sharded.update_tensors(), torch::optim::SGDOptions(0.05));
          for (int step = 0; step < 10; ++step) {
            optimizer.zero_grad();
            loss_of(model->forward(rows_of(make_inputs(8, 5, step), world->rank(), 4))).backward();
            optimizer.step();
          }
          std::vector<std::int64_t> mine;
          for (const char* name : {"shard", "replicate"}) {
            const DataAxis& axis = axis_of(sharded, name);
            for (comm::Communicator* each : {axis.gather.get(), axis.reduce.get()}) {
              mine.push_back(static_cast<std::int64_t>(each->log().size()));
              mine.push_back(static_cast<std::int64_t>(each->log().hash()));
            }
          }
          EXPECT_GT(axis_of(sharded, "replicate").reduce->log().size(), 0U);
          const at::Tensor row = at::tensor(mine, at::kLong);
          const at::Tensor all = at::empty({4, row.numel()}, at::kLong);
          world->world_communicator()->all_gather(all.view({-1}), row)->wait_released();
          EXPECT_TRUE(at::equal(all, row.expand_as(all))) << all;
        }
      },
      run_options({4, 2}, GetParam())
  );
}

TEST_P(TwoTierScheduleTest, ASlowRankChangesNoBit) {
  testing::run_ranks(
      4,
      [](const std::shared_ptr<comm::World>& world) {
        for (const Strategy strategy :
             {Strategy::kHierarchical, Strategy::kHsdp, Strategy::kZero3}) {
          ProbedRun run;
          run.replicate = 2;
          run.steps = 3;
          run.options = tier_options(strategy);
          const auto expected = train_probed(world, run);
          run.slow_rank = 1;
          for (const int depth : {1, 2}) {
            for (const std::int64_t bucket_bytes : {layout::kBucketOfOne, layout::kBucketOfAll}) {
              run.options.gradient_buffers = depth;
              run.options.bucket_bytes = bucket_bytes;
              expect_same_run(
                  train_probed(world, run),
                  expected,
                  to_text(strategy) + ", depth " + std::to_string(depth) + ", buckets of " +
                      std::to_string(bucket_bytes)
              );
            }
          }
        }
      },
      run_options({4, 2}, GetParam())
  );
}

/// How many backwards of blocks two ranks have begun, and the hold of one by the other.
struct Pair {
  std::atomic<int> leader{0};
  std::atomic<int> follower{0};
  std::atomic<bool> is_stuck{false};

  void hold_until_leader_has_begun(int count) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (leader.load() < count && !is_stuck.load()) {
      is_stuck = std::chrono::steady_clock::now() > limit;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
};

// Of two ranks of a supernode one does not go on with a block's backward until the other, which it
// holds up, has filled the ring of gradient buffers: who waits earlier waits for ever.
void expect_a_full_ring_ahead(
    const Tiers& tiers, const FullyShardOptions& options, const std::string& what
) {
  constexpr int kBlocks = 7;
  constexpr int kSteps = 3;
  std::vector<Pair> pairs(static_cast<std::size_t>(tiers.num_ranks / 2));
  testing::run_ranks(
      tiers.num_ranks,
      [&](const std::shared_ptr<comm::World>& world) {
        Pair& pair = pairs[static_cast<std::size_t>(world->rank() / 2)];
        const bool leads = world->rank() % 2 == 0;
        ProbedNet model(kBlocks);
        const ShardedModel sharded =
            fully_shard(*model, make_mesh(world, tiers.num_supernodes), options);
        ASSERT_EQ(sharded.engine().gradient_buffer_depth(), options.gradient_buffers);
        int step = 0;
        *model->visit_backward = [&](int) {
          if (leads) {
            ++pair.leader;
            return;
          }
          const int own = ++pair.follower;
          const int ring = std::min(own + options.gradient_buffers - 1, (step + 1) * kBlocks);
          pair.hold_until_leader_has_begun(ring);
          std::this_thread::sleep_for(std::chrono::milliseconds(1));  // to go too far, if it would
          EXPECT_EQ(pair.leader.load(), ring) << what << ", backward " << own;
        };
        for (; step < kSteps; ++step) {
          sharded.zero_grad();
          const at::Tensor batch = make_inputs(2 * world->size(), 5, step);
          loss_of(model->forward(rows_of(batch, world->rank(), world->size()))).backward();
        }
      },
      run_options(tiers, RankBackend::kLocal)
  );
}

TEST(BackwardPipelineTest, ARankWaitsForAPeerOnlyAFullRingOfBuffersAhead) {
  for (const int depth : {1, 2, 3}) {
    for (const std::int64_t bucket_bytes :
         {layout::kBucketOfOne, kTwoBlocks, layout::kBucketOfAll}) {
      const std::string what =
          "depth " + std::to_string(depth) + ", buckets of " + std::to_string(bucket_bytes);
      FullyShardOptions options = tier_options(Strategy::kHierarchical, bucket_bytes);
      options.gradient_buffers = depth;
      expect_a_full_ring_ahead({4, 2}, options, what);
    }
    FullyShardOptions options = tier_options(Strategy::kZero3);
    options.gradient_buffers = depth;
    expect_a_full_ring_ahead({2, 1}, options, "zero3, depth " + std::to_string(depth));
  }
}

/// Buckets that were sent and whose sums have not come to rest.
std::int64_t buckets_in_flight(const ShardedModel& sharded, std::int64_t sent_before) {
  std::set<std::string> all;
  std::set<std::string> incomplete;
  for (const auto& unit : sharded.engine().units()) {
    const std::string& bucket = sharded.engine().buckets().name_of(unit->index());
    all.insert(bucket);
    for (const auto& group : unit->groups()) {
      if (group->gradient_is_fresh()) {
        incomplete.insert(bucket);
      }
    }
  }
  const std::int64_t sent = log_between(sharded).count(comm::Op::kReduceScatter) - sent_before;
  return sent - static_cast<std::int64_t>(all.size() - incomplete.size());
}

// On the delayed back end a result comes some time after it was asked for: a backward that waited
// for its buckets would have none under way.
TEST(BackwardPipelineTest, TheFirstBlocksBackwardBeginsWhileBucketsCross) {
  for (const std::int64_t bucket_bytes : {layout::kBucketOfOne, kTwoBlocks}) {
    testing::run_ranks(
        4,
        [&](const std::shared_ptr<comm::World>& world) {
          ProbedNet model(8);
          const ShardedModel sharded = fully_shard(
              *model, make_mesh(world, 2), tier_options(Strategy::kHierarchical, bucket_bytes)
          );
          std::int64_t sent_before = 0;
          int num_overlapped = 0;
          *model->visit_backward = [&](int block) {
            const bool crosses = block == 0 && buckets_in_flight(sharded, sent_before) > 0;
            num_overlapped += crosses ? 1 : 0;
          };
          for (int step = 0; step < 10; ++step) {
            sharded.zero_grad();
            sent_before = log_between(sharded).count(comm::Op::kReduceScatter);
            loss_of(model->forward(rows_of(make_inputs(8, 5, step), world->rank(), 4))).backward();
            EXPECT_EQ(buckets_in_flight(sharded, sent_before), 0);
          }
          EXPECT_GT(num_overlapped, 0) << "rank " << world->rank() << ", " << bucket_bytes;
        },
        run_options({4, 2}, RankBackend::kDelayed)
    );
  }
}

/// What a model of so many equal blocks holds beside its shards.
std::pair<std::int64_t, std::int64_t> peak_bytes(
    const std::shared_ptr<comm::World>& world, const FullyShardOptions& options, int num_blocks
) {
  Net model(NetOptions{.num_blocks = num_blocks});
  const ShardedModel sharded = fully_shard(*model, make_mesh(world, 2), options);
  for (int step = 0; step < 3; ++step) {
    sharded.zero_grad();
    loss_of(model->forward(rows_of(make_inputs(8, 5, step), world->rank(), 4))).backward();
  }
  return {
      sharded.counters().gradient_buffer_bytes,
      sharded.counters().peak_unsharded_bytes,
  };
}

TEST(LiveMemoryTest, PeakDoesNotDependOnTheNumberOfBlocks) {
  struct Case {
    std::int64_t bucket_bytes;
    int few;
    int many;
  };
  testing::run_ranks(
      4,
      [](const std::shared_ptr<comm::World>& world) {
        for (const Strategy strategy :
             {Strategy::kHierarchical, Strategy::kHsdp, Strategy::kZero3}) {
          for (const Share share : {Share::kAuto, Share::kOff}) {
            // Buckets of more units hold up more buffers: those of one are full with 4 blocks.
            for (const Case& c : {Case{layout::kBucketOfOne, 4, 16}, Case{1000, 8, 16}}) {
              FullyShardOptions options = tier_options(strategy, c.bucket_bytes);
              options.share = share;
              const auto few = peak_bytes(world, options, c.few);
              const auto many = peak_bytes(world, options, c.many);
              const std::string what = to_text(strategy) + ", buckets of " +
                                       std::to_string(c.bucket_bytes) +
                                       (share == Share::kOff ? ", not shared" : "");
              EXPECT_EQ(few.first, many.first) << what << ": gradient buffers";
              EXPECT_EQ(few.second, many.second) << what << ": unsharded parameters";
              EXPECT_GT(few.first, 0) << what;
              EXPECT_EQ(few.second > 0, share == Share::kOff || strategy == Strategy::kZero3)
                  << what;
            }
          }
        }
      },
      run_options({4, 2}, RankBackend::kLocal)
  );
}

using Json = nlohmann::json;

/// The span of a name in a lane of a rank, null if there is none.
const Json* find_span(
    const Json& events, int rank, const std::string& lane, const std::string& name
) {
  for (const Json& event : events) {
    if (event.at("ph") == "X" && event.at("pid") == rank && event.at("cat") == lane &&
        event.at("name") == name) {
      return &event;
    }
  }
  ADD_FAILURE() << "rank " << rank << " has no span '" << name << "' in lane '" << lane << "'";
  return nullptr;
}

/// The arrows that leave (`s`) a span at its end, or come in (`f`) at its beginning.
std::set<std::uint64_t> arrows_of(const Json& events, const Json* span, const std::string& phase) {
  constexpr double kNearUs = 0.002;
  std::set<std::uint64_t> arrows;
  if (span == nullptr) {
    return arrows;
  }
  const double begin = span->at("ts").get<double>();
  const double time = phase == "f" ? begin : begin + span->at("dur").get<double>();
  for (const Json& event : events) {
    if (event.at("ph") == phase && event.at("pid") == span->at("pid") &&
        event.at("tid") == span->at("tid") &&
        std::abs(event.at("ts").get<double>() - time) < kNearUs) {
      arrows.insert(event.at("id").get<std::uint64_t>());
    }
  }
  return arrows;
}

bool leads_to(const Json& events, const Json* from, const Json* to) {
  const std::set<std::uint64_t> ends = arrows_of(events, to, "f");
  const std::set<std::uint64_t> starts = arrows_of(events, from, "s");
  return std::any_of(starts.begin(), starts.end(), [&](std::uint64_t arrow) {
    return ends.count(arrow) > 0;
  });
}

TEST(TwoTierTraceTest, ArrowsLeadFromABackwardToItsReductionsOnEveryRank) {
  start_trace();
  testing::run_ranks(
      4,
      [](const std::shared_ptr<comm::World>& world) {
        Net model;
        const ShardedModel sharded =
            fully_shard(*model, make_mesh(world, 2), tier_options(Strategy::kHierarchical));
        const at::Tensor batch = make_inputs(8, 5, 0);
        loss_of(model->forward(rows_of(batch, world->rank(), 4))).backward();
      },
      run_options({4, 2}, RankBackend::kLocal)
  );
  stop_trace();
  const Json trace = Json::parse(trace_json());
  const Json& events = trace.at("traceEvents");
  for (int rank = 0; rank < 4; ++rank) {
    for (const std::string unit : {"blocks.0", "blocks.1", "blocks.2"}) {
      const Json* backward = find_span(events, rank, "compute", "backward " + unit);
      const Json* inside = find_span(events, rank, "reduce", "reduce " + unit);
      const Json* between = find_span(events, rank, "between supernodes", "reduce " + unit);
      EXPECT_TRUE(leads_to(events, backward, inside)) << "rank " << rank << ", " << unit;
      EXPECT_TRUE(leads_to(events, inside, between)) << "rank " << rank << ", " << unit;
      EXPECT_FALSE(leads_to(events, backward, between)) << "rank " << rank << ", " << unit;
    }
  }
}

}  // namespace
}  // namespace hypershard::shard::test
