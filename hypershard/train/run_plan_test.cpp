// Checks the plan against what a real step does: the log of every rank's communicators.
#include "hypershard/train/run_plan.h"

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
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

class RunPlanTest : public ::testing::TestWithParam<Case> {
 protected:
  static void SetUpTestSuite() { folder_ = std::make_unique<test::TextFolder>("run_plan"); }
  static void TearDownTestSuite() { folder_.reset(); }

  static std::unique_ptr<test::TextFolder> folder_;
};

std::unique_ptr<test::TextFolder> RunPlanTest::folder_;

// Empties the logs of a model's communicators, or adds their entries to `out`.
void visit_logs(const Session& session, std::multiset<Entry>* out) {
  std::set<comm::Communicator*> seen;
  const shard::DataParallel& parallel = session.sharded().engine().parallel();
  if (session.config().has_plan()) {
    seen.insert(session.mesh().axis("tp").get());
  }
  for (const auto& item : parallel.plan_reduce) {
    seen.insert(item.second.get());
  }
  for (const auto* axes : {&parallel.cuts, &parallel.summed}) {
    for (const shard::DataAxis& axis : *axes) {
      seen.insert(axis.gather.get());
      seen.insert(axis.reduce.get());
    }
  }
  for (comm::Communicator* communicator : seen) {
    if (out == nullptr) {
      communicator->log().clear();
      communicator->log().keep_all(true);
      continue;
    }
    for (const comm::LogEntry& entry : communicator->log().entries()) {
      if (entry.unit != "gradient norm" && entry.unit != "agreement") {
        out->emplace(to_text(entry.op), entry.communicator, entry.unit, entry.payload_bytes);
      }
    }
  }
}

std::string text_of_entries(const std::multiset<Entry>& entries) {
  std::string text;
  for (const auto& [op, communicator, unit, bytes] : entries) {
    text += op + " " + communicator + " " + unit + " " + std::to_string(bytes) + "\n";
  }
  return text;
}

TEST_P(RunPlanTest, AgreesWithTheLogOfAStep) {
  const Case& test = GetParam();
  RunConfigFile file;
  folder_->load(file, test.overrides, test.num_ranks);
  const RunConfig& config = file.config();
  std::vector<std::multiset<Entry>> planned(static_cast<std::size_t>(test.num_ranks));
  std::vector<std::multiset<Entry>> logged(planned.size());
  for (int rank = 0; rank < test.num_ranks; ++rank) {
    const RunPlan plan = plan_run(config, 256, test.num_ranks, rank);
    for (const auto* list : {&plan.collectives, &plan.crossings}) {
      for (const PlannedCollective& each : *list) {
        planned[static_cast<std::size_t>(rank)].emplace(
            to_text(each.op), each.axis, each.unit, each.payload_bytes
        );
      }
    }
  }
  test::run_on_ranks(
      config,
      test.num_ranks,
      [&](const std::shared_ptr<comm::World>& world) {
        const Session session(config, world, open_data(config, world->size()));
        session.initialize();
        run_step(session, 0, {});  // the order of units is agreed on in the first
        run_step(session, 1, {});
        visit_logs(session, nullptr);
        run_step(session, 2, {});
        visit_logs(session, &logged[static_cast<std::size_t>(world->rank())]);
      },
      test.backend
  );
  for (std::size_t rank = 0; rank < planned.size(); ++rank) {
    EXPECT_EQ(text_of_entries(planned[rank]), text_of_entries(logged[rank])) << "rank " << rank;
  }
}

const std::string kOff = "parallel.share=off";

INSTANTIATE_TEST_SUITE_P(
    All,
    RunPlanTest,
    ::testing::Values(
        Case{"zero3_shared", 2, {}},
        Case{"zero3_gathered", 2, {kOff}},
        Case{"zero3_stays_whole", 2, {kOff, "parallel.reshard_after_forward=false"}},
        Case{"zero3_c10d", 2, {"parallel.backend=c10d"}, testing::RankBackend::kGloo},
        Case{"ddp", 2, {"parallel.strategy=ddp"}},
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
        Case{
            "hierarchical_buckets",
            4,
            {"parallel.strategy=hierarchical",
             "parallel.replicate=2",
             "parallel.supernodes=2",
             "parallel.bucket_bytes=1000000000",
             "precision.wire=bf16"}
        },
        Case{"zero3_two_tiers", 4, {"parallel.replicate=2", "parallel.supernodes=2"}},
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

}  // namespace
}  // namespace hypershard::train
