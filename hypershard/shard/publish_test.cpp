// The publish of updated parameters runs beside the forward that needs them: in which order, how
// far ahead, and always with the bits of one that is over before the forward.
#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "hypershard/layout/bucket.h"
#include "hypershard/shard/publisher.h"
#include "hypershard/shard/test_probed_net.h"

namespace hypershard::shard::test {
namespace {

using layout::Strategy;
using testing::RankBackend;

const std::vector<std::string> kTwoNodes{"a", "a", "b", "b"};

// In whatever dtype, more than one of a ProbedNet's blocks fill a bucket, and less than all.
constexpr std::int64_t kSomeUnits = 1300;

std::string backend_name(const ::testing::TestParamInfo<RankBackend>& each) {
  return testing::to_text(each.param);
}

class PublishTest : public ::testing::TestWithParam<RankBackend> {};
INSTANTIATE_TEST_SUITE_P(Backends, PublishTest, ::testing::ValuesIn(all_backends()), backend_name);

bool has_nan(const at::Tensor& values) {
  return at::isnan(values.detach()).any().item<bool>();
}

// On the delayed back end nothing arrives before somebody waits for it, or asks in vain for a while
// first.
TEST(PublishOrderTest, TheFirstForwardBeginsBeforeTheLastPublishHasArrived) {
  struct Case {
    Strategy strategy;
    int replicate;
  };
  constexpr int kBlocks = 12;
  for (const Case c :
       {Case{Strategy::kZero1, 1},
        Case{Strategy::kZero1, 2},
        Case{Strategy::kZero2, 2},
        Case{Strategy::kHierarchical, 2}}) {
    testing::run_ranks(
        4,
        [&](const std::shared_ptr<comm::World>& world) {
          ProbedNet model(kBlocks);
          FullyShardOptions options = block_units();
          options.strategy = c.strategy;
          const ShardedModel sharded = fully_shard(*model, make_mesh(world, c.replicate), options);
          const Engine& engine = sharded.engine();
          torch::optim::AdamW optimizer(sharded.update_tensors(), torch::optim::AdamWOptions(0.01));
          const at::Tensor& last =
              model->blocks[kBlocks - 1]->as<ProbedBlockImpl>()->linear->weight;
          int early = 0;
          *model->visit = [&](int block) {
            const auto arrived = [&](int number) {  // the root is unit 0
              return engine.publisher().has_arrived(*engine.units(
              )[static_cast<std::size_t>(number + 1)]);
            };
            EXPECT_TRUE(arrived(block));
            if (block == kRootVisit) {
              early += arrived(kBlocks - 1) ? 0 : 1;
              if (c.strategy != Strategy::kHierarchical) {  // there it cannot be looked at yet
                EXPECT_TRUE(has_nan(last)) << "what is under way is NaN";
                EXPECT_FALSE(has_nan(model->in->weight));
              }
            }
          };
          constexpr int kSteps = 3;
          for (int step = 0; step < kSteps; ++step) {
            const at::Tensor loss =
                loss_of(model->forward(rows_of(make_inputs(8, 5, step), world->rank(), 4)));
            EXPECT_FALSE(has_nan(loss));
            for (const auto& unit : engine.units()) {
              EXPECT_TRUE(engine.publisher().has_arrived(*unit)) << unit->path();
            }
            loss.backward();
            optimizer.step();
          }
          EXPECT_EQ(early, kSteps) << layout::to_text(c.strategy);
          EXPECT_GT(sharded.counters().publish_wait_ns, 0);
          EXPECT_EQ(
              sharded.counters().inter_publish_wait_ns > 0, c.strategy == Strategy::kHierarchical
          ) << "the nodes differ along `replicate` only";
        },
        {.backend = RankBackend::kDelayed,
         .supernodes =
             c.strategy == Strategy::kHierarchical ? kTwoNodes : std::vector<std::string>()}
    );
  }
}

TEST_P(PublishTest, UnitsArePublishedInTheOrderOfTheForward) {
  // What lies elsewhere is gathered over the one axis, or between the supernodes.
  for (const Strategy strategy : {Strategy::kZero1, Strategy::kHierarchical}) {
    const bool has_tiers = strategy == Strategy::kHierarchical;
    const int num_ranks = has_tiers ? 4 : 2;
    testing::run_ranks(
        num_ranks,
        [&](const std::shared_ptr<comm::World>& world) {
          ProbedNet model(3);
          model->last_first = true;
          FullyShardOptions options = block_units();
          options.strategy = strategy;
          const ShardedModel sharded =
              fully_shard(*model, make_mesh(world, has_tiers ? 2 : 1), options);
          const DataAxis& axis = sharded.engine().parallel().cuts.back();
          EXPECT_EQ(axis.name, has_tiers ? "replicate" : "shard");
          comm::CollectiveLog& log = axis.gather->log();
          const auto forward_order = [&] {
            log.clear();
            log.keep_all(true);
            const at::Tensor batch = make_inputs(8, 5, 0);
            loss_of(model->forward(rows_of(batch, world->rank(), num_ranks))).backward();
            std::vector<std::string> units;
            for (const comm::LogEntry& entry : log.entries()) {
              units.push_back(entry.unit);
            }
            return units;
          };
          using Units = std::vector<std::string>;
          EXPECT_EQ(forward_order(), Units({"root", "blocks.0", "blocks.1", "blocks.2"}))
              << "no order is known before the first forward";
          EXPECT_EQ(forward_order(), Units({"root", "blocks.2", "blocks.1", "blocks.0"}));
        },
        {.backend = GetParam(), .supernodes = has_tiers ? kTwoNodes : std::vector<std::string>()}
    );
  }
}

std::vector<ProbedRun> all_runs() {
  std::vector<ProbedRun> runs;
  for (const Strategy strategy :
       {Strategy::kDdp,
        Strategy::kZero1,
        Strategy::kZero2,
        Strategy::kZero3,
        Strategy::kHsdp,
        Strategy::kHierarchical}) {
    for (const bool bf16 : {false, true}) {
      ProbedRun run;
      run.options.strategy = strategy;
      run.replicate = 2;
      if (bf16) {
        run.dtype = at::kFloat;
        run.options.precision.compute = at::kBFloat16;
      }
      runs.push_back(run);
    }
  }
  return runs;
}

std::string to_text(const ProbedRun& run) {
  return std::string(layout::to_text(run.options.strategy)) +
         (run.options.precision.compute ? " bf16" : "") +
         (run.options.share == Share::kOff ? " share off" : "");
}

TEST_P(PublishTest, OverlappingChangesNoBit) {
  testing::run_ranks(
      4,
      [](const std::shared_ptr<comm::World>& world) {
        for (ProbedRun run : all_runs()) {
          run.overlap = false;
          const auto expected = train_probed(world, run);
          run.overlap = true;
          for (const Share share : {Share::kAuto, Share::kOff}) {
            run.options.share = share;
            expect_same_run(train_probed(world, run), expected, to_text(run));
          }
        }
      },
      {.backend = GetParam(), .supernodes = kTwoNodes}
  );
}

TEST_P(PublishTest, RandomSleepsOnEveryRankChangeNoBit) {
  testing::run_ranks(
      4,
      [](const std::shared_ptr<comm::World>& world) {
        for (ProbedRun run : all_runs()) {
          const Strategy strategy = run.options.strategy;
          if (strategy != Strategy::kHierarchical && strategy != Strategy::kZero2 &&
              strategy != Strategy::kZero3) {
            continue;  // of the others each is like one of these
          }
          const bool is_long =
              strategy == Strategy::kHierarchical && !run.options.precision.compute;
          run.steps = is_long ? 200 : 30;
          run.overlap = false;
          run.options.bucket_bytes = layout::kBucketOfOne;
          const auto expected = train_probed(world, run);
          run.overlap = true;
          run.sleeps = true;
          run.options.forward_prefetch = 2;
          for (const Share share : {Share::kAuto, Share::kOff}) {
            const bool never_shares = strategy == Strategy::kZero2;
            if (share == Share::kOff && never_shares) {
              continue;
            }
            run.options.share = share;
            run.options.bucket_bytes =
                share == Share::kOff || never_shares ? kSomeUnits : layout::kBucketOfOne;
            expect_same_run(train_probed(world, run), expected, to_text(run));
          }
        }
      },
      {.backend = GetParam(), .supernodes = kTwoNodes, .deadline_s = 200}
  );
}

// More units than a communicator holds calls in flight.
TEST_P(PublishTest, ManyUnitsDoNotFloodTheBackEnd) {
  if (GetParam() == RankBackend::kDelayed) {
    GTEST_SKIP() << "the local back end that it delays is tested itself";
  }
  testing::run_ranks(
      2,
      [](const std::shared_ptr<comm::World>& world) {
        ProbedRun run;
        run.options.strategy = Strategy::kZero1;
        run.num_blocks = 600;
        run.steps = 3;
        run.overlap = false;
        const auto expected = train_probed(world, run);
        run.overlap = true;
        expect_same_run(train_probed(world, run), expected, "many units");
      },
      {.backend = GetParam()}
  );
}

}  // namespace
}  // namespace hypershard::shard::test
