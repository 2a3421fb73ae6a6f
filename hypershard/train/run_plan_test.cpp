// Checks the plan against what a real step does: the log of every rank's communicators.
#include "hypershard/train/run_plan.h"

#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "hypershard/shard/engine.h"
#include "hypershard/train/session.h"
#include "hypershard/train/step.h"
#include "hypershard/train/test_session.h"

namespace hypershard::train {
namespace {

using Entry = std::tuple<std::string, std::string, std::string, std::int64_t>;

struct Case {
  std::string name;
  int num_ranks;
  std::vector<std::string> overrides;
  testing::RankBackend backend = testing::RankBackend::kLocal;
};

class RunPlanTest : public ::testing::TestWithParam<Case> {};

constexpr std::int64_t kVocabSize = 256;

// Tokens are drawn, not read: ranks that are processes would leave a folder behind.
void load(RunConfigFile& file, const std::vector<std::string>& overrides, int num_ranks) {
  file.load_text(
      "[data]\npath = \"x\"\n[model]\nlayers = 3\ndim = 32\nheads = 2\nsequence = 16\n"
      "[batch]\nglobal_batch = 24\n",
      "plan.toml",
      overrides,
      num_ranks
  );
}

// Bytes that leave a rank in a step, by communicator and link.
using SentBytes = std::map<std::pair<std::string, layout::Tier>, std::int64_t>;

/// What one rank communicates in a step.
struct StepTraffic {
  std::multiset<Entry> entries;
  SentBytes sent;
};

std::set<comm::Communicator*> communicators_of(const Session& session) {
  std::set<comm::Communicator*> all;
  const shard::DataParallel& parallel = session.sharded().engine().parallel();
  if (session.config().has_plan()) {
    all.insert(session.mesh().axis("tp").get());
  }
  for (const auto& item : parallel.plan_reduce) {
    all.insert(item.second.get());
  }
  for (const auto* axes : {&parallel.cuts, &parallel.summed}) {
    for (const shard::DataAxis& axis : *axes) {
      all.insert(axis.gather.get());
      all.insert(axis.reduce.get());
    }
  }
  return all;
}

/// Logs a step of a model's communicators, from its making on.
class StepLog {
 public:
  explicit StepLog(const Session& session) {
    for (comm::Communicator* communicator : communicators_of(session)) {
      communicator->log().clear();
      communicator->log().keep_all(true);
      sent_before_[communicator] = communicator->stats().sent_bytes;
    }
  }

  StepTraffic traffic() const {
    StepTraffic traffic;
    for (const auto& [communicator, before] : sent_before_) {
      std::int64_t sent = communicator->stats().sent_bytes - before;
      for (const comm::LogEntry& entry : communicator->log().entries()) {
        if (entry.unit == "gradient norm" || entry.unit == "agreement") {
          sent -= entry.payload_bytes / communicator->size() * (communicator->size() - 1);
        } else {
          traffic.entries.emplace(
              to_text(entry.op), entry.communicator, entry.unit, entry.payload_bytes
          );
        }
      }
      if (sent != 0) {
        traffic.sent[{communicator->info().name, communicator->info().tier}] += sent;
      }
    }
    return traffic;
  }

 private:
  std::map<comm::Communicator*, std::int64_t> sent_before_;
};

StepTraffic traffic_of(const RunPlan& plan) {
  StepTraffic traffic;
  for (const auto* list : {&plan.collectives, &plan.crossings}) {
    for (const PlannedCollective& each : *list) {
      traffic.entries.emplace(to_text(each.op), each.axis, each.unit, each.payload_bytes);
      if (each.sent_bytes != 0) {
        traffic.sent[{each.axis, each.tier}] += each.sent_bytes;
      }
    }
  }
  return traffic;
}

std::string text_of_entries(const std::multiset<Entry>& entries) {
  std::string text;
  for (const auto& [op, communicator, unit, bytes] : entries) {
    text += op + " " + communicator + " " + unit + " " + std::to_string(bytes) + "\n";
  }
  return text;
}

std::string text_of_sent(const SentBytes& sent) {
  std::string text;
  for (const auto& [where, bytes] : sent) {
    text += where.first + " " + to_text(where.second) + " " + std::to_string(bytes) + "\n";
  }
  return text;
}

// On the rank itself: if that is a process, its log ends with it.
void expect_agrees(const RunPlan& plan, const StepTraffic& logged, const Session& session) {
  const StepTraffic planned = traffic_of(plan);
  EXPECT_EQ(text_of_entries(planned.entries), text_of_entries(logged.entries))
      << "rank " << plan.rank;
  EXPECT_EQ(text_of_sent(planned.sent), text_of_sent(logged.sent)) << "rank " << plan.rank;
  EXPECT_EQ(plan.memory.gradient_buffers, session.sharded().counters().gradient_buffer_bytes)
      << "rank " << plan.rank;
}

TEST_P(RunPlanTest, AgreesWithTheLogOfAStep) {
  const Case& test = GetParam();
  RunConfigFile file;
  load(file, test.overrides, test.num_ranks);
  const RunConfig& config = file.config();
  std::vector<RunPlan> plans;
  for (int rank = 0; rank < test.num_ranks; ++rank) {
    plans.push_back(plan_run(config, kVocabSize, test.num_ranks, rank));
  }
  test::run_on_ranks(
      config,
      test.num_ranks,
      [&](const std::shared_ptr<comm::World>& world) {
        const Session session(config, world, random_data(kVocabSize));
        session.initialize();
        run_step(session, 0, {});  // the order of units is agreed on in the first
        run_step(session, 1, {});
        const StepLog log(session);
        run_step(session, 2, {});
        expect_agrees(plans[static_cast<std::size_t>(world->rank())], log.traffic(), session);
      },
      test.backend
  );
}

const std::string kOff = "parallel.share=off";

std::vector<std::string> two_tiers(std::vector<std::string> more) {
  more.emplace_back("parallel.replicate=2");
  more.emplace_back("parallel.supernodes=2");
  return more;
}

std::vector<std::string> four_supernodes(std::vector<std::string> more) {
  more.emplace_back("parallel.replicate=4");
  more.emplace_back("parallel.supernodes=4");
  return more;
}

std::vector<std::string> two_tiers_accumulated(std::vector<std::string> more) {
  more.emplace_back("batch.accumulation=2");
  return two_tiers(std::move(more));
}

INSTANTIATE_TEST_SUITE_P(
    All,
    RunPlanTest,
    ::testing::Values(
        Case{"zero3_shared", 2, {}},
        Case{"zero3_gathered", 2, {kOff}},
        Case{"zero3_stays_whole", 2, {kOff, "parallel.reshard_after_forward=false"}},
        Case{"zero3_c10d", 2, {"parallel.backend=c10d"}, testing::RankBackend::kGloo},
        Case{"ddp", 2, {"parallel.strategy=ddp"}},
        Case{"ddp_of_three", 3, {"parallel.strategy=ddp"}},
        Case{"zero1", 3, {"parallel.strategy=zero1", kOff}},
        Case{"zero2", 2, {"parallel.strategy=zero2", kOff}},
        Case{
            "hsdp",
            4,
            {"parallel.strategy=hsdp", "parallel.replicate=2", "parallel.supernodes=2", kOff}
        },
        Case{
            "hierarchical_shared",
            4,
            {"parallel.strategy=hierarchical", "parallel.replicate=2", "parallel.supernodes=2"}
        },
        Case{
            "hierarchical_one_rank_a_supernode",
            2,
            {"parallel.strategy=hierarchical", "parallel.replicate=2", "parallel.supernodes=2"}
        },
        Case{"ddp_one_rank_a_supernode", 2, two_tiers({"parallel.strategy=ddp"})},
        Case{"zero1_one_rank_a_supernode", 2, two_tiers({"parallel.strategy=zero1"})},
        Case{"zero2_one_rank_a_supernode", 2, two_tiers({"parallel.strategy=zero2"})},
        Case{"zero3_one_rank_a_supernode", 2, two_tiers({})},
        Case{"hsdp_one_rank_a_supernode", 2, two_tiers({"parallel.strategy=hsdp"})},
        Case{
            "hierarchical_four_supernodes", 4, four_supernodes({"parallel.strategy=hierarchical"})
        },
        Case{"zero3_four_supernodes", 4, four_supernodes({})},
        Case{"hsdp_four_supernodes", 4, four_supernodes({"parallel.strategy=hsdp"})},
        Case{
            "hierarchical_buckets",
            4,
            {"parallel.strategy=hierarchical",
             "parallel.replicate=2",
             "parallel.supernodes=2",
             "parallel.bucket_bytes=1000000000",
             "precision.wire=bf16"}
        },
        Case{"zero3_two_tiers", 4, two_tiers({})},
        Case{"zero3_two_tiers_gathered", 4, two_tiers({kOff})},
        Case{"zero2_two_tiers", 4, two_tiers({"parallel.strategy=zero2"})},
        Case{"zero1_two_tiers", 4, two_tiers({"parallel.strategy=zero1"})},
        Case{"ddp_two_tiers", 4, two_tiers({"parallel.strategy=ddp"})},
        Case{"ddp_in_uneven_shares", 6, two_tiers({"parallel.strategy=ddp"})},
        Case{"ddp_bf16_between", 4, two_tiers({"parallel.strategy=ddp", "precision.wire=bf16"})},
        Case{"hsdp_bf16_between", 4, two_tiers({"parallel.strategy=hsdp", "precision.wire=bf16"})},
        Case{
            "two_tiers_accumulate_every",
            4,
            two_tiers_accumulated({"parallel.strategy=hierarchical", "batch.sync=every"})
        },
        Case{
            "two_tiers_accumulate_last",
            4,
            two_tiers_accumulated({"parallel.strategy=hierarchical", "batch.sync=last"})
        },
        Case{
            "two_tiers_accumulate_inner",
            4,
            two_tiers_accumulated({"parallel.strategy=hierarchical", "batch.sync=inner"})
        },
        Case{
            "two_tiers_accumulate_unstated",
            4,
            two_tiers_accumulated({"parallel.strategy=hierarchical"})
        },
        Case{
            "ddp_two_tiers_accumulate_every",
            4,
            two_tiers_accumulated({"parallel.strategy=ddp", "batch.sync=every"})
        },
        Case{
            "ddp_two_tiers_accumulate_inner",
            4,
            two_tiers_accumulated({"parallel.strategy=ddp", "batch.sync=inner"})
        },
        Case{
            "hsdp_two_tiers_accumulate_every",
            4,
            two_tiers_accumulated({"parallel.strategy=hsdp", "batch.sync=every"})
        },
        Case{
            "hsdp_two_tiers_accumulate_last",
            4,
            two_tiers_accumulated({"parallel.strategy=hsdp", "batch.sync=last"})
        },
        Case{
            "hsdp_two_tiers_accumulate_inner",
            4,
            two_tiers_accumulated({"parallel.strategy=hsdp", "batch.sync=inner"})
        },
        Case{
            "zero2_two_tiers_accumulate_inner",
            4,
            two_tiers_accumulated({"parallel.strategy=zero2", "batch.sync=inner"})
        },
        Case{"zero3_two_tiers_accumulate_every", 4, two_tiers_accumulated({"batch.sync=every"})},
        Case{"zero3_two_tiers_accumulate_last", 4, two_tiers_accumulated({"batch.sync=last"})},
        Case{"zero3_two_tiers_accumulate_inner", 4, two_tiers_accumulated({"batch.sync=inner"})},
        Case{
            "hierarchical_buckets_c10d",
            4,
            two_tiers(
                {"parallel.strategy=hierarchical",
                 "parallel.backend=c10d",
                 "parallel.bucket_bytes=30000"}
            ),
            testing::RankBackend::kGloo
        },
        Case{
            "hierarchical_processes",
            4,
            two_tiers_accumulated({"parallel.strategy=hierarchical", "parallel.bucket_bytes=30000"}
            ),
            testing::RankBackend::kShm
        },
        Case{
            "zero3_processes",
            4,
            two_tiers_accumulated({"parallel.bucket_bytes=0"}),
            testing::RankBackend::kShm
        },
        Case{
            "stated_layouts",
            4,
            {"parallel.split_runtime=[]",
             "parallel.split_gradient=[\"shard\"]",
             "parallel.split_update=[\"replicate\", \"shard\"]",
             "parallel.replicate=2",
             "parallel.supernodes=2"}
        },
        Case{"accumulate_last", 2, {kOff, "batch.accumulation=3", "batch.sync=last"}},
        Case{"accumulate_every", 2, {kOff, "batch.accumulation=3"}},
        Case{"zero1_accumulate_every", 2, {"parallel.strategy=zero1", "batch.accumulation=2"}},
        Case{
            "accumulate_inner",
            4,
            {"parallel.strategy=hsdp",
             "parallel.replicate=2",
             "batch.accumulation=2",
             "batch.sync=inner",
             kOff}
        },
        Case{"recompute", 2, {kOff, "model.recompute=true"}},
        Case{"bf16", 2, {"precision.compute=bf16"}},
        Case{"tensor", 2, {"parallel.tp=2"}},
        Case{"tensor_and_shards", 4, {"parallel.tp=2", "model.recompute=true", kOff}},
        Case{
            "sequence_accumulated",
            4,
            {"parallel.tp=2",
             "parallel.plan=tensor,sequence",
             "parallel.strategy=hsdp",
             "parallel.replicate=2",
             "batch.accumulation=2",
             "batch.sync=inner"}
        },
        Case{"vocabulary", 2, {"parallel.tp=2", "parallel.plan=vocabulary"}},
        Case{
            "everything_in_fp64",
            4,
            {"parallel.tp=2",
             "parallel.plan=tensor,sequence,vocabulary",
             "batch.accumulation=2",
             "precision.compute=fp64",
             "model.tie_embeddings=false"}
        },
        Case{
            "vocabulary_with_whole_logits",
            2,
            {"parallel.tp=2",
             "parallel.plan=vocabulary",
             "model.tie_embeddings=false",
             "plan.outputs={\"head\"={tp=\"replicate\"}}"}
        }
    ),
    [](const auto& each) { return each.param.name; }
);

Sync sync_of(const std::vector<std::string>& overrides) {
  RunConfigFile file;
  load(file, overrides, 4);
  return gradient_sync(file.config(), 4);
}

TEST(RunPlanSyncTest, IsInnerOverTwoTiersIfNotStated) {
  for (const char* strategy : {"ddp", "zero1", "zero2", "zero3", "hsdp", "hierarchical"}) {
    const std::string stated = std::string("parallel.strategy=") + strategy;
    EXPECT_EQ(sync_of(two_tiers_accumulated({stated})), Sync::kInner) << strategy;
    for (const auto& [word, sync] :
         {std::pair("every", Sync::kEvery), std::pair("last", Sync::kLast)}) {
      EXPECT_EQ(sync_of(two_tiers_accumulated({stated, std::string("batch.sync=") + word})), sync)
          << strategy;
    }
  }
  EXPECT_EQ(sync_of({"batch.accumulation=2"}), Sync::kEvery) << "there is one tier";
}

TEST(RunPlanSyncTest, IsInnerWhereReplicasAreWhatIsLeft) {
  const std::vector<std::string> left = {
      "parallel.shard=2", "parallel.replicate=-1", "parallel.supernodes=2", "batch.accumulation=2"
  };
  EXPECT_EQ(sync_of(left), Sync::kInner);
}

TEST(RunPlanSizeTest, BigModelOnManyRanksNeedsNoMemory) {
  RunConfigFile file;
  file.load_text(
      "[data]\npath = \"x\"\n[model]\nlayers = 40\ndim = 5120\nheads = 40\nsequence = 4096\n"
      "[parallel]\nstrategy = \"hsdp\"\nreplicate = 64\nsupernodes = 64\n"
      "[batch]\nglobal_batch = 4096\n[precision]\ncompute = \"bf16\"\n",
      "big.toml",
      {},
      4096
  );
  const RunPlan plan = plan_run(file.config(), 32'000, 4096, 4095);
  EXPECT_GT(plan.parameters, 12'000'000'000);
  EXPECT_EQ(plan.units.size(), 41U);
  // Two axes reduce each unit; gathers run inside a supernode of 64 ranks.
  EXPECT_EQ(plan.mesh.axis_size("shard"), 64);
  // 12 bytes an element for fp32 parameters and AdamW's state, a 64th each.
  const double state = static_cast<double>(plan.memory.update + plan.memory.optimizer);
  EXPECT_NEAR(state, 12.0 * static_cast<double>(plan.parameters) / 64, 0.001 * state);
  EXPECT_NE(describe(plan).find("blocks.0 ... blocks.39 (40 alike)"), std::string::npos)
      << describe(plan);
}

std::string plan_text(const std::vector<std::string>& overrides) {
  RunConfigFile file;
  file.load_text("[data]\npath = \"x\"\n[model]\nlayers = 2\n", "run.toml", overrides, 4);
  return describe(plan_run(file.config(), 256, 4));
}

TEST(RunPlanTextTest, SaysHowBucketsWereChosen) {
  const std::string said = "one unit a bucket here; a run measures the link";
  const std::string hierarchical = "parallel.strategy=hierarchical";
  const auto says_it = [&](const std::vector<std::string>& overrides) {
    return plan_text(overrides).find(said) != std::string::npos;
  };
  EXPECT_TRUE(says_it(two_tiers({hierarchical}))) << plan_text(two_tiers({hierarchical}));
  EXPECT_FALSE(says_it(two_tiers({hierarchical, "parallel.bucket_bytes=0"})));
  EXPECT_FALSE(says_it(two_tiers({"parallel.strategy=hsdp"}))) << "nothing there is cut";
  EXPECT_FALSE(says_it({hierarchical, "parallel.replicate=2"})) << "no link to measure";
  EXPECT_TRUE(says_it({hierarchical, "parallel.replicate=2", "parallel.backend=c10d"}));
}

}  // namespace
}  // namespace hypershard::train
