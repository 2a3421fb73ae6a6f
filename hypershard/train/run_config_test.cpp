// Checks that a slip in a run's configuration is refused with its place and a way out.
#include "hypershard/train/run_config.h"

#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "hypershard/core/error.h"
#include "hypershard/core/text.h"

namespace hypershard::train {
namespace {

constexpr const char* kSmallest = "[data]\npath = \"data/x\"\n";

std::string problem_of(
    const std::string& text, const std::vector<std::string>& overrides = {}, int world_size = 0
) {
  RunConfigFile file;
  try {
    file.load_text(text, "run.toml", overrides, world_size);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "(no error)";
}

void expect_problem(const std::string& problem, std::initializer_list<const char*> fragments) {
  for (const char* fragment : fragments) {
    EXPECT_NE(problem.find(fragment), std::string::npos) << "no '" << fragment << "' in:\n"
                                                         << problem;
  }
}

TEST(RunConfigTest, FillsWhatIsLeftOpen) {
  RunConfigFile file;
  file.load_text(kSmallest, "configs/tiny.toml", {}, 1);
  const RunConfig& config = file.config();
  EXPECT_EQ(config.run.name, "tiny");
  EXPECT_EQ(config.run.dir, "runs/tiny");
  EXPECT_EQ(config.metrics_path(), "runs/tiny/metrics.jsonl");
  EXPECT_EQ(config.model.kv_heads, config.model.heads);
  EXPECT_EQ(config.model.hidden_dim, 512);  // 8/3 of 192
}

TEST(RunConfigTest, ResolvedTextReadsBackTheSame) {
  RunConfigFile first;
  first.load_text(kSmallest, "tiny.toml", std::vector<std::string>{"model.dim=96"}, 2);
  RunConfigFile second;
  second.load_text(first.to_toml(), "config.toml", {}, 2);
  EXPECT_EQ(second.to_toml(), first.to_toml());
  EXPECT_EQ(second.config().run.name, "tiny");
  EXPECT_EQ(second.config().model.hidden_dim, 256);
}

TEST(RunConfigTest, OverridesComeAfterTheFile) {
  RunConfigFile file;
  file.load_text(
      concat_text(kSmallest, "[schedule]\nsteps = 100\n"),
      "run.toml",
      std::vector<std::string>{"schedule.steps=77", "parallel.strategy=hsdp"},
      1
  );
  EXPECT_EQ(file.config().schedule.steps, 77);
  EXPECT_EQ(file.config().parallel.strategy, layout::Strategy::kHsdp);
}

TEST(RunConfigTest, TensorParallelRanksTakeTheirShareOfTheMesh) {
  RunConfigFile file;
  file.load_text(
      kSmallest,
      "run.toml",
      std::vector<std::string>{"parallel.tp=2", "parallel.replicate=2", "batch.global_batch=4"},
      8
  );
  EXPECT_EQ(file.config().mesh_sizes(8), (std::vector<int>{2, 2, 2}));
  EXPECT_EQ(file.config().num_data_ranks(8), 4);
  EXPECT_EQ(file.config().parallel.plan, (std::vector<std::string>{"tensor"}));
  EXPECT_TRUE(file.config().has_plan());
  RunConfigFile again;
  again.load_text(file.to_toml(), "run.toml", std::vector<std::string>{"parallel.tp=1"}, 4);
  EXPECT_EQ(again.config().mesh_sizes(4), (std::vector<int>{2, 2, 1}));
  EXPECT_FALSE(again.config().has_plan());
}

TEST(RunConfigTest, LayoutsAreStatedForAllPlanesOverDataAxes) {
  expect_problem(
      problem_of(kSmallest, {"parallel.split_runtime=[\"shard\"]"}),
      {"parallel.split_gradient", "not given", "split_update"}
  );
  expect_problem(
      problem_of(
          kSmallest,
          {"parallel.split_runtime=[]",
           "parallel.split_gradient=[\"tp\"]",
           "parallel.split_update=[\"shard\"]"}
      ),
      {"parallel.split_gradient", "no data axis 'tp'", "replicate"}
  );
  EXPECT_EQ(
      problem_of(
          kSmallest,
          {"parallel.split_runtime=[]",
           "parallel.split_gradient=[]",
           "parallel.split_update=[\"shard\"]"}
      ),
      "(no error)"
  );
}

std::vector<std::string> split_along(
    const std::string& runtime, const std::string& gradient, const std::string& update
) {
  return {
      "parallel.split_runtime=" + runtime,
      "parallel.split_gradient=" + gradient,
      "parallel.split_update=" + update
  };
}

TEST(RunConfigTest, StatedLayoutsThatDoNotNestAreRefusedAtTheirKey) {
  const std::string both = "[\"replicate\", \"shard\"]";
  const std::string shard = "[\"shard\"]";
  const std::string replicate = "[\"replicate\"]";
  expect_problem(
      problem_of(kSmallest, split_along("[]", shard, "[]")),
      {"parallel.split_gradient", "not by the update layout", "gradient it never receives"}
  );
  expect_problem(
      problem_of(kSmallest, split_along("[]", replicate, both)),
      {"parallel.split_gradient", "cut first along 'shard'", "'replicate' only"}
  );
  expect_problem(
      problem_of(kSmallest, split_along(replicate, both, both)),
      {"parallel.split_runtime", "cut first along 'shard'", "'replicate' only"}
  );
  expect_problem(
      problem_of(kSmallest, split_along(shard, "[]", shard)),
      {"parallel.split_gradient", "not split along 'shard'", "split_runtime"}
  );
  EXPECT_EQ(problem_of(kSmallest, split_along("[]", shard, both)), "(no error)");
  EXPECT_EQ(problem_of(kSmallest, split_along(shard, both, both)), "(no error)");
  EXPECT_EQ(problem_of(kSmallest, split_along("[]", replicate, replicate)), "(no error)");
}

TEST(RunConfigTest, PlanRulesAreReadWithTheRest) {
  RunConfigFile file;
  file.load_text(
      concat_text(kSmallest, "[plan.outputs]\n\"blocks.*.mlp\" = { tp = \"replicate\" }\n"),
      "run.toml",
      {},
      1
  );
  ASSERT_EQ(file.config().plan.outputs.size(), 1U);
  EXPECT_TRUE(file.config().has_plan());
  RunConfigFile again;
  again.load_text(file.to_toml(), "run.toml", {}, 1);
  EXPECT_EQ(again.config().plan.outputs, file.config().plan.outputs);
}

TEST(RunConfigTest, PlanThatCannotBeIsRefused) {
  const std::vector<std::string> two = {"parallel.tp=2"};
  const auto with = [&two](std::vector<std::string> more) {
    more.insert(more.begin(), two.begin(), two.end());
    return more;
  };
  expect_problem(
      problem_of(kSmallest, two, 3), {"parallel.tp", "groups of 2 ranks", "divisor of 3"}
  );
  expect_problem(
      problem_of(kSmallest, with({"parallel.plan=[\"tensors\"]"}), 2),
      {"parallel.plan", "'tensors'", "did you mean 'tensor'"}
  );
  expect_problem(
      problem_of(kSmallest, with({"parallel.plan=[\"sequence\"]"}), 2), {"parallel.plan", "both"}
  );
  expect_problem(
      problem_of(kSmallest, with({"parallel.plan=[]"}), 2), {"parallel.plan", "the same work"}
  );
  expect_problem(
      problem_of(kSmallest, with({"model.heads=3"}), 2),
      {"model.heads", "3 heads", "parallel.tp = 2", "2 or 4"}
  );
  expect_problem(
      problem_of(kSmallest, with({"model.kv_heads=3"}), 2), {"model.kv_heads", "3 heads of keys"}
  );
  expect_problem(
      problem_of(kSmallest, with({"parallel.shard=3"}), 4),
      {"parallel.shard", "by tp = 2", "4 ranks"}
  );
  expect_problem(
      problem_of(kSmallest, with({"batch.global_batch=9"}), 4),
      {"batch.global_batch", "2 data ranks", "8 or 10"}
  );
  expect_problem(
      problem_of(concat_text(kSmallest, "[plan.outputs]\nhead = { tp = \"shart(1)\" }\n")),
      {"plan.outputs", "shart(1)"}
  );
}

TEST(RunConfigTest, UnknownKeyNamesLineAndNearestKey) {
  expect_problem(
      problem_of(concat_text(kSmallest, "[model]\nlayer = 3\n")),
      {"run.toml:4", "model.layer", "did you mean", "layers"}
  );
}

TEST(RunConfigTest, WrongTypeNamesLineAndType) {
  expect_problem(
      problem_of(concat_text(kSmallest, "[schedule]\nsteps = \"many\"\n")),
      {"run.toml:4", "schedule.steps", "integer"}
  );
}

TEST(RunConfigTest, WrongWordListsTheWords) {
  expect_problem(
      problem_of(concat_text(kSmallest, "[parallel]\nstrategy = \"zero4\"\n")),
      {"run.toml:4", "parallel.strategy", "zero3", "ddp"}
  );
}

TEST(RunConfigTest, MissingDataPathIsNamed) {
  expect_problem(problem_of("[model]\ndim = 192\n"), {"data.path"});
}

TEST(RunConfigTest, HeadsMustDivideTheWidth) {
  expect_problem(
      problem_of(concat_text(kSmallest, "[model]\ndim = 192\nheads = 5\n")),
      {"run.toml:5", "5 heads", "192", "190 or 195"}
  );
}

TEST(RunConfigTest, BatchMustBeDealtEvenly) {
  expect_problem(
      problem_of(concat_text(kSmallest, "[batch]\nglobal_batch = 16\n"), {}, 3),
      {"run.toml:4", "16 rows", "3 ranks", "15 or 18"}
  );
}

TEST(RunConfigTest, MoreRanksThanRowsIsSaidSo) {
  expect_problem(
      problem_of(concat_text(kSmallest, "[batch]\nglobal_batch = 2\n"), {}, 4),
      {"fewer rows than parts", "2 rows", "4 ranks", "at least 4"}
  );
}

TEST(RunConfigTest, MeshMustHoldTheRanks) {
  expect_problem(
      problem_of(kSmallest, {"parallel.replicate=2", "parallel.shard=3"}, 4),
      {"parallel.shard", "replicate = 2", "shard = 3", "4 ranks"}
  );
}

TEST(RunConfigTest, OpenAxisTakesWhatIsLeft) {
  RunConfigFile file;
  file.load_text(kSmallest, "run.toml", std::vector<std::string>{"parallel.replicate=2"}, 8);
  EXPECT_EQ(file.config().mesh_sizes(8), (std::vector<int>{2, 4, 1}));
}

TEST(RunConfigTest, OpenAxisMustDivide) {
  expect_problem(
      problem_of(kSmallest, {"parallel.replicate=3"}, 8), {"parallel.replicate", "8 ranks"}
  );
}

TEST(RunConfigTest, WarmupMustFit) {
  expect_problem(
      problem_of(kSmallest, {"schedule.steps=10", "schedule.warmup_steps=11"}),
      {"schedule.warmup_steps", "11", "10"}
  );
}

TEST(RunConfigTest, EveryProblemIsListedAtOnce) {
  expect_problem(
      problem_of(concat_text(kSmallest, "[model]\nlayer = 3\ndim = -4\n")),
      {"model.layer", "model.dim"}
  );
}

TEST(RunConfigTest, SizesThatWouldOverflowAreRefused) {
  expect_problem(
      problem_of(kSmallest, {"batch.global_batch=9223372036854775806"}),
      {"batch.global_batch", "at most"}
  );
  expect_problem(
      problem_of(kSmallest, {"batch.accumulation=9223372036854775806"}),
      {"batch.accumulation", "at most"}
  );
  expect_problem(
      problem_of(kSmallest, {"log.trace_steps=9223372036854775807"}), {"log.trace_steps"}
  );
  expect_problem(
      problem_of(kSmallest, {"parallel.timeout_s=1e300"}), {"parallel.timeout_s", "31536000"}
  );
}

TEST(RunConfigTest, BadPatternOfUnitsIsNamedWithItsKey) {
  expect_problem(
      problem_of(kSmallest, {"parallel.units=[\"blocks.[\"]"}),
      {"parallel.units", "blocks.[", "never closed"}
  );
}

TEST(RunConfigTest, EmptyDataPathIsNamed) {
  expect_problem(problem_of(kSmallest, {"data.path="}), {"data.path", "empty"});
}

TEST(RunConfigTest, InnerSyncNeedsReplicas) {
  expect_problem(problem_of(kSmallest, {"batch.sync=inner"}, 2), {"batch.sync", "replicate"});
}

TEST(RunConfigTest, HalfIsRefusedWhereGradientsPass) {
  expect_problem(problem_of(kSmallest, {"precision.compute=fp16"}), {"compute", "scaling", "bf16"});
  expect_problem(problem_of(kSmallest, {"precision.reduce=fp16"}), {"reduce", "scaling", "bf16"});
  EXPECT_EQ(problem_of(kSmallest, {"precision.compute=bf16"}), "(no error)");
}

std::int64_t traced_steps(const std::string& text, const std::vector<std::string>& overrides) {
  RunConfigFile file;
  file.load_text(concat_text(kSmallest, text), "run.toml", overrides, 1);
  return file.config().log.trace_steps;
}

TEST(RunConfigTest, AProfileTakesTenStepsUnlessToldOtherwise) {
  EXPECT_EQ(traced_steps("", {}), 3);
  EXPECT_EQ(traced_steps("", {"log.profile=true"}), 10);
  EXPECT_EQ(traced_steps("[log]\nprofile = true\n", {}), 10);
  EXPECT_EQ(traced_steps("[log]\ntrace_steps = 3\n", {"log.profile=true"}), 3);
  EXPECT_EQ(traced_steps("[log]\nprofile = true\n", {"log.trace_steps=4"}), 4);
}

TEST(RunConfigTest, ATraceGoesToAFileOrTheRunsFolder) {
  RunConfigFile file;
  const auto path = [&](const std::vector<std::string>& overrides) {
    file.load_text(kSmallest, "tiny.toml", overrides, 1);
    return file.config().trace_path();
  };
  EXPECT_EQ(path({}), "");
  EXPECT_EQ(path({"log.profile=true"}), "runs/tiny/trace.json");
  EXPECT_EQ(path({"log.trace=a/b.json", "log.profile=true"}), "a/b.json");
  EXPECT_EQ(path({"log.trace=runs/tiny"}), "runs/tiny/trace.json");  // not there yet
  EXPECT_EQ(path({"log.trace=" + ::testing::TempDir()}), ::testing::TempDir() + "trace.json");
}

// Sets variables and takes them away again.
class VariablesTest : public ::testing::Test {
 protected:
  static constexpr const char* kNames[] = {"HS_SEED", "HS_SHARE", "HS_THREADS", "HS_TRACE"};

  void SetUp() override {
    ::setenv("HS_SEED", "5", 1);
    ::setenv("HS_SHARE", "off", 1);
    ::setenv("HS_THREADS", "7", 1);
    ::setenv("HS_TRACE", "from_variable.json", 1);
  }
  void TearDown() override {
    for (const char* name : kNames) {
      ::unsetenv(name);
    }
  }
};

void expect_values(const RunConfig& config, std::int64_t seed, shard::Share share, int threads) {
  EXPECT_EQ(config.run.seed, seed);
  EXPECT_EQ(config.parallel.share, share);
  EXPECT_EQ(config.run.threads, threads);
}

TEST_F(VariablesTest, FillWhatIsLeftOpen) {
  RunConfigFile file;
  file.load_text(kSmallest, "run.toml", {}, 1);
  expect_values(file.config(), 5, shard::Share::kOff, 7);
  EXPECT_EQ(file.config().log.trace, "from_variable.json");
  const std::vector<std::string> open = {"parallel.share=auto", "run.threads=0", "log.trace="};
  file.load_text(kSmallest, "run.toml", open, 1);
  expect_values(file.config(), 5, shard::Share::kOff, 7);
  EXPECT_EQ(file.config().log.trace, "from_variable.json");
}

TEST_F(VariablesTest, GiveWayToAKeyOfTheFile) {
  RunConfigFile file;
  file.load_text(
      concat_text(
          kSmallest,
          "[run]\nseed = 1\nthreads = 2\n[parallel]\nshare = \"on\"\n[log]\ntrace = \"t.json\"\n"
      ),
      "run.toml",
      {},
      1
  );
  expect_values(file.config(), 1, shard::Share::kOn, 2);
  EXPECT_EQ(file.config().log.trace, "t.json");
}

TEST_F(VariablesTest, GiveWayToAnOverride) {
  RunConfigFile file;
  const std::vector<std::string> given = {"run.seed=1", "run.threads=2", "parallel.share=on"};
  file.load_text(kSmallest, "run.toml", given, 1);
  expect_values(file.config(), 1, shard::Share::kOn, 2);
}

}  // namespace
}  // namespace hypershard::train
