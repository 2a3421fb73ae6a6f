// When what is reduced over two tiers: the pipeline behind backward never waits for a peer too
// early, keeps its order and its bits whoever is late, and holds no more memory for more layers.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
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

std::vector<comm::Communicator*> data_communicators(const ShardedModel& sharded) {
  std::vector<comm::Communicator*> all;
  for (const char* name : {"shard", "replicate"}) {
    const DataAxis& axis = axis_of(sharded, name);
    all.push_back(axis.gather.get());
    all.push_back(axis.reduce.get());
  }
  return all;
}

/// What was done for which unit, in order.
std::string order_of(const comm::CollectiveLog& log) {
  std::string order;
  for (const comm::LogEntry& entry : log.entries()) {
    order += comm::to_text(entry.op) + " " + entry.unit + "\n";
  }
  return order;
}

/// Expects one order on all ranks, and within a communicator the same sizes: shares of what
/// crosses between supernodes may differ inside. Collective: all ranks.
void expect_equal_logs(
    comm::World& world,
    const std::vector<comm::Communicator*>& communicators,
    const std::string& what
) {
  std::vector<std::int64_t> mine;
  for (comm::Communicator* each : communicators) {
    const std::size_t order = std::hash<std::string>()(order_of(each->log()));
    mine.push_back(static_cast<std::int64_t>(order));
    mine.push_back(static_cast<std::int64_t>(each->log().hash()));
  }
  const at::Tensor row = at::tensor(mine, at::kLong);
  const at::Tensor all = at::empty({world.size(), row.numel()}, at::kLong);
  world.world_communicator()->all_gather(all.view({-1}), row)->wait_released();
  for (std::size_t i = 0; i < communicators.size(); ++i) {
    const comm::GroupInfo& info = communicators[i]->info();
    const auto column = static_cast<std::int64_t>(2 * i);
    EXPECT_TRUE(all.select(1, column).eq(mine[2 * i]).all().item<bool>())
        << what << ", orders on '" << info.name << "', here:\n"
        << order_of(communicators[i]->log());
    for (const int peer : info.global_ranks) {
      EXPECT_EQ(all[peer][column + 1].item<std::int64_t>(), mine[2 * i + 1])
          << what << ", '" << info.name << "' on rank " << peer;
    }
  }
}

// The ranks' models lie differently in memory, and their passes take differently long.
void expect_same_order(
    const std::shared_ptr<comm::World>& world,
    const FullyShardOptions& options,
    int num_micro,
    const std::string& what
) {
  ProbedNet model(6, at::kDouble, /*memory_shift=*/world->rank());
  RandomSleep sleep(world->rank());
  *model->visit = [&](int) { sleep.pass(300); };
  *model->visit_backward = *model->visit;
  const ShardedModel sharded = fully_shard(*model, make_mesh(world, 2), options);
  const std::vector<comm::Communicator*> communicators = data_communicators(sharded);
  for (comm::Communicator* each : communicators) {
    each->log().clear();
    each->log().keep_all(true);
  }
  torch::optim::SGD optimizer(sharded.update_tensors(), torch::optim::SGDOptions(0.05));
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    for (int micro = 0; micro < num_micro; ++micro) {
      sharded.set_requires_all_reduce(micro + 1 == num_micro);
      const at::Tensor batch = make_inputs(8, 5, step + micro);
      loss_of(model->forward(rows_of(batch, world->rank(), 4))).backward();
    }
    optimizer.step();
  }
  EXPECT_GT(log_between(sharded).size(), 0U) << what;
  expect_equal_logs(*world, communicators, what);
}

TEST_P(TwoTierScheduleTest, CollectivesComeInTheSameOrderOnAllRanks) {
  testing::run_ranks(
      4,
      [](const std::shared_ptr<comm::World>& world) {
        for (const Strategy strategy : kAllStrategies) {
          for (const std::int64_t bucket_bytes :
               {layout::kBucketOfOne, kTwoBlocks, layout::kBucketOfAll}) {
            for (const int num_micro : {1, 2}) {
              expect_same_order(
                  world,
                  tier_options(strategy, bucket_bytes),
                  num_micro,
                  to_text(strategy) + ", buckets of " + std::to_string(bucket_bytes) + ", " +
                      std::to_string(num_micro) + " micro-batches"
              );
            }
          }
        }
      },
      run_options({4, 2}, GetParam())
  );
}

/// Trains with a late rank at several depths and buckets beside ranks that are all in time.
void expect_no_bit_changed(const std::shared_ptr<comm::World>& world, ProbedRun run) {
  const std::string name = to_text(run.options.strategy) +
                           (run.slow_forward ? ", late in forward, " : ", late in backward, ") +
                           std::to_string(run.num_micro) + " micro-batches";
  const auto expected = train_probed(world, run);
  run.slow_rank = 1;
  for (const int depth : {1, 2}) {
    for (const std::int64_t bucket_bytes : {layout::kBucketOfOne, layout::kBucketOfAll}) {
      run.options.gradient_buffers = depth;
      run.options.bucket_bytes = bucket_bytes;
      expect_same_run(
          train_probed(world, run),
          expected,
          name + ", depth " + std::to_string(depth) + ", buckets of " + std::to_string(bucket_bytes)
      );
    }
  }
}

TEST_P(TwoTierScheduleTest, ASlowRankChangesNoBit) {
  testing::run_ranks(
      4,
      [](const std::shared_ptr<comm::World>& world) {
        for (const Strategy strategy : kAllStrategies) {
          ProbedRun run;
          run.replicate = 2;
          run.steps = 2;
          run.options = tier_options(strategy);
          expect_no_bit_changed(world, run);
          run.slow_forward = true;
          expect_no_bit_changed(world, run);
          run.slow_forward = false;
          run.num_micro = 2;
          expect_no_bit_changed(world, run);
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

/// What a model holds beside its shards.
struct Held {
  std::int64_t gradient_bytes = 0;
  std::int64_t unsharded_bytes = 0;
};

/// Of so many equal blocks, after some steps; all micro-batches but the last are summed inside the
/// supernode only.
Held held_bytes(
    const std::shared_ptr<comm::World>& world,
    const FullyShardOptions& options,
    int num_micro,
    int num_blocks
) {
  Net model(NetOptions{.num_blocks = num_blocks});
  const ShardedModel sharded = fully_shard(*model, make_mesh(world, 2), options);
  for (int step = 0; step < 3; ++step) {
    sharded.zero_grad();
    for (int micro = 0; micro < num_micro; ++micro) {
      sharded.set_requires_all_reduce(micro + 1 == num_micro);
      loss_of(model->forward(rows_of(make_inputs(8, 5, step), world->rank(), 4))).backward();
    }
  }
  return {
      .gradient_bytes = sharded.counters().gradient_buffer_bytes,
      .unsharded_bytes = sharded.counters().peak_unsharded_bytes,
  };
}

/// A model's size in blocks: once the ring of gradient buffers is full, more need no more.
struct Growth {
  std::int64_t bucket_bytes;
  int few;
  int many;
};

void expect_constant_memory(
    const std::shared_ptr<comm::World>& world,
    const FullyShardOptions& options,
    int num_micro,
    const Growth& growth
) {
  const Strategy strategy = options.strategy;
  const bool is_shared = options.share != Share::kOff;
  const Held few = held_bytes(world, options, num_micro, growth.few);
  const Held many = held_bytes(world, options, num_micro, growth.many);
  const std::string what = to_text(strategy) + ", buckets of " +
                           std::to_string(growth.bucket_bytes) + ", " + std::to_string(num_micro) +
                           " micro-batches" + (is_shared ? "" : ", not shared");
  EXPECT_EQ(few.gradient_bytes, many.gradient_bytes) << what;
  EXPECT_EQ(few.unsharded_bytes, many.unsharded_bytes) << what;
  // Gradients that every rank has whole are summed where they rest.
  const bool rests_whole = strategy == Strategy::kDdp || strategy == Strategy::kZero1;
  EXPECT_EQ(few.gradient_bytes > 0, !rests_whole) << what;
  const bool splits_inside = strategy == Strategy::kHsdp || strategy == Strategy::kHierarchical;
  EXPECT_EQ(few.unsharded_bytes > 0, strategy == Strategy::kZero3 || (splits_inside && !is_shared))
      << what;
}

TEST(LiveMemoryTest, PeakDoesNotDependOnTheNumberOfBlocks) {
  testing::run_ranks(
      4,
      [](const std::shared_ptr<comm::World>& world) {
        for (const Strategy strategy : kAllStrategies) {
          for (const Share share : {Share::kAuto, Share::kOff}) {
            // A bucket of two units holds up more buffers than four blocks have.
            for (const Growth& growth :
                 {Growth{layout::kBucketOfOne, 4, 16}, Growth{1000, 8, 16}}) {
              for (const int num_micro : {1, 2}) {
                FullyShardOptions options = tier_options(strategy, growth.bucket_bytes);
                options.share = share;
                expect_constant_memory(world, options, num_micro, growth);
              }
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
