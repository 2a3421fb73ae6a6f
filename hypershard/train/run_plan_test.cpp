// Checks the plan against what a real step does: the log of every rank's communicators.
#include "hypershard/train/run_plan.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "hypershard/data/prepare.h"
#include "hypershard/shard/engine.h"
#include "hypershard/testing/run_ranks.h"
#include "hypershard/train/session.h"
#include "hypershard/train/step.h"

namespace hypershard::train {
namespace {

namespace fs = std::filesystem;

using Entry = std::tuple<std::string, std::string, std::string, std::int64_t>;

struct Case {
  std::string name;
  int num_ranks;
  std::vector<std::string> overrides;
  testing::RankBackend backend = testing::RankBackend::kLocal;
};

class RunPlanTest : public ::testing::TestWithParam<Case> {
 protected:
  static void SetUpTestSuite() {
    folder_ = fs::temp_directory_path() / ("hs_run_plan_" + std::to_string(::getpid()));
    fs::create_directories(folder_);
    for (const char* name : {"a.txt", "b.txt"}) {
      std::ofstream file(folder_ / name);
      for (int line = 0; line < 200; ++line) {
        file << "line " << line << " of a text without any sense\n";
      }
    }
    data::PrepareOptions options;
    options.out_dir = (folder_ / "data").string();
    options.holdout = {"b"};
    data::prepare_text({(folder_ / "a.txt").string(), (folder_ / "b.txt").string()}, options);
  }
  static void TearDownTestSuite() { fs::remove_all(folder_); }

  static void load(RunConfigFile& file, const Case& test) {
    const std::string text = "[data]\npath = \"" + (folder_ / "data").string() +
                             "\"\n[model]\nlayers = 3\ndim = 32\nheads = 2\nsequence = 16\n"
                             "[batch]\nglobal_batch = 24\n";
    file.load_text(text, "plan.toml", test.overrides, test.num_ranks);
  }

  static fs::path folder_;
};

fs::path RunPlanTest::folder_;

// Empties the logs of a model's communicators, or adds their entries to `out`.
void visit_logs(const shard::ShardedModel& model, std::multiset<Entry>* out) {
  std::set<comm::Communicator*> seen;
  const shard::DataParallel& parallel = model.engine().parallel();
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
  load(file, test);
  const RunConfig& config = file.config();
  std::vector<std::multiset<Entry>> planned(static_cast<std::size_t>(test.num_ranks));
  std::vector<std::multiset<Entry>> logged(planned.size());
  for (int rank = 0; rank < test.num_ranks; ++rank) {
    for (const PlannedCollective& each : plan_run(config, 256, test.num_ranks, rank).collectives) {
      planned[static_cast<std::size_t>(rank)].emplace(
          to_text(each.op), each.axis, each.unit, each.payload_bytes
      );
    }
  }
  testing::RunRanksOptions options{.backend = test.backend};
  const layout::Topology topology = planned_topology(config, test.num_ranks);
  for (int rank = 0; rank < test.num_ranks; ++rank) {
    options.supernodes.push_back(std::to_string(topology.supernode_of(rank)));
  }
  testing::run_ranks(
      test.num_ranks,
      [&](const std::shared_ptr<comm::World>& world) {
        const Session session(config, world, open_data(config, world->size()));
        session.initialize();
        run_step(session, 0, {});  // the order of units is agreed on in the first
        run_step(session, 1, {});
        visit_logs(session.sharded(), nullptr);
        run_step(session, 2, {});
        visit_logs(session.sharded(), &logged[static_cast<std::size_t>(world->rank())]);
      },
      options
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
        Case{"bf16", 2, {"precision.compute=bf16"}}
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
