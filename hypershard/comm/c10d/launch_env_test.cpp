// Every launcher's environment as a row, and every way in which one can be wrong.
#include "hypershard/comm/c10d/launch_env.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "hypershard/core/error.h"

namespace hypershard::comm {
namespace {

struct Place {
  Launcher launcher = Launcher::kNone;
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 1;
  std::string master_addr;
  int restart_count = 0;
  std::string run_id;
};

struct GoodCase {
  std::string name;
  EnvironmentMap environment;
  Place place;
  int master_port = 0;  ///< -1: one of our own choice
};

void PrintTo(const GoodCase& good, std::ostream* stream) {
  *stream << good.name;
}

class LaunchEnvGoodTest : public ::testing::TestWithParam<GoodCase> {};

TEST_P(LaunchEnvGoodTest, FindsThePlace) {
  const GoodCase& good = GetParam();
  const LaunchInfo info = parse_launch_env(good.environment);
  EXPECT_EQ(to_text(info.launcher), to_text(good.place.launcher));
  EXPECT_EQ(info.rank, good.place.rank);
  EXPECT_EQ(info.world_size, good.place.world_size);
  EXPECT_EQ(info.local_rank, good.place.local_rank);
  EXPECT_EQ(info.local_world_size, good.place.local_world_size);
  EXPECT_EQ(info.master_addr, good.place.master_addr);
  EXPECT_EQ(info.restart_count, good.place.restart_count);
  EXPECT_EQ(info.run_id, good.place.run_id);
  if (good.master_port >= 0) {
    EXPECT_EQ(info.master_port, good.master_port);
  } else {
    EXPECT_GE(info.master_port, 20000);
    EXPECT_LT(info.master_port, 32000);
  }
}

const EnvironmentMap kSlurmStep = {
    {"SLURM_PROCID", "5"},
    {"SLURM_NTASKS", "7"},
    {"SLURM_LOCALID", "1"},
    {"SLURM_NODEID", "2"},
    {"SLURM_STEP_TASKS_PER_NODE", "2(x3),1"},
    {"SLURM_STEP_NODELIST", "node[003-005,012]"},
    {"SLURM_JOB_ID", "4711"},
    {"SLURM_STEP_ID", "3"}
};

EnvironmentMap with(EnvironmentMap environment, const EnvironmentMap& more) {
  for (const auto& [name, value] : more) {
    environment[name] = value;
  }
  return environment;
}

INSTANTIATE_TEST_SUITE_P(
    Launchers,
    LaunchEnvGoodTest,
    ::testing::Values(
        GoodCase{"nothing", {{"HOME", "/root"}}, {}},
        GoodCase{"empty_counts_as_unset", {{"RANK", ""}, {"WORLD_SIZE", ""}}, {}},
        GoodCase{
            "torchrun",
            {{"RANK", "3"},
             {"WORLD_SIZE", "4"},
             {"LOCAL_RANK", "1"},
             {"LOCAL_WORLD_SIZE", "2"},
             {"MASTER_ADDR", "10.0.0.1"},
             {"MASTER_PORT", "29500"},
             {"TORCHELASTIC_RESTART_COUNT", "2"},
             {"TORCHELASTIC_RUN_ID", "abc"}},
            {Launcher::kTorchrun, 3, 4, 1, 2, "10.0.0.1", 2, "abc"},
            29500
        },
        GoodCase{
            "torchrun_without_local_place",
            {{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "1"}},
            {Launcher::kTorchrun, 3, 4, 0, 0, "h", 0, ""},
            1
        },
        GoodCase{
            "one_rank_needs_no_address",
            {{"RANK", "0"}, {"WORLD_SIZE", "1"}},
            {Launcher::kTorchrun, 0, 1, 0, 1, "", 0, ""}
        },
        GoodCase{
            "own_launcher",
            {{"RANK", "1"},
             {"WORLD_SIZE", "2"},
             {"LOCAL_RANK", "1"},
             {"LOCAL_WORLD_SIZE", "2"},
             {"MASTER_ADDR", "127.0.0.1"},
             {"MASTER_PORT", "4000"},
             {"HS_JOB_NONCE", "f00d"}},
            {Launcher::kHypershard, 1, 2, 1, 2, "127.0.0.1", 0, "f00d"},
            4000
        },
        GoodCase{
            "open_mpi_on_one_host",
            {{"OMPI_COMM_WORLD_RANK", "2"},
             {"OMPI_COMM_WORLD_SIZE", "4"},
             {"OMPI_COMM_WORLD_LOCAL_RANK", "2"},
             {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
             {"PMIX_NAMESPACE", "prterun-7@1"}},
            {Launcher::kMpi, 2, 4, 2, 4, "127.0.0.1", 0, "prterun-7@1"},
            -1
        },
        GoodCase{
            "open_mpi_on_two_hosts",
            {{"OMPI_COMM_WORLD_RANK", "2"},
             {"OMPI_COMM_WORLD_SIZE", "4"},
             {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
             {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
             {"MASTER_ADDR", "first"},
             {"MASTER_PORT", "77"}},
            {Launcher::kMpi, 2, 4, 0, 2, "first", 0, ""},
            77
        },
        GoodCase{
            "mpich",
            {{"PMI_RANK", "1"},
             {"PMI_SIZE", "2"},
             {"MPI_LOCALRANKID", "1"},
             {"MPI_LOCALNRANKS", "2"}},
            {Launcher::kMpi, 1, 2, 1, 2, "127.0.0.1", 0, ""},
            -1
        },
        GoodCase{
            "mpich_inside_a_slurm_allocation",
            with(
                kSlurmStep,
                {{"PMI_RANK", "1"},
                 {"PMI_SIZE", "2"},
                 {"MPI_LOCALRANKID", "1"},
                 {"MPI_LOCALNRANKS", "2"}}
            ),
            {Launcher::kMpi, 1, 2, 1, 2, "127.0.0.1", 0, ""},
            -1
        },
        GoodCase{"srun", kSlurmStep, {Launcher::kSlurm, 5, 7, 1, 2, "node003", 0, "4711.3"}, -1},
        GoodCase{
            "srun_with_pmi2",
            with(kSlurmStep, {{"PMI_RANK", "5"}, {"PMI_SIZE", "7"}}),
            {Launcher::kSlurm, 5, 7, 1, 2, "node003", 0, "4711.3"},
            -1
        },
        GoodCase{
            "srun_with_address",
            with(kSlurmStep, {{"MASTER_ADDR", "head"}, {"MASTER_PORT", "31"}}),
            {Launcher::kSlurm, 5, 7, 1, 2, "head", 0, "4711.3"},
            31
        },
        GoodCase{
            "slurm_batch_script_without_srun",
            {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_JOB_ID", "4711"}},
            {}
        },
        GoodCase{
            "torchrun_under_srun",
            with(
                kSlurmStep,
                {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "m"}, {"MASTER_PORT", "9"}}
            ),
            {Launcher::kTorchrun, 0, 2, 0, 0, "m", 0, ""},
            9
        }
    ),
    [](const auto& test) { return test.param.name; }
);

TEST(LaunchEnvTest, KnowsThatTorchrunServesTheStore) {
  EnvironmentMap environment = {
      {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "m"}, {"MASTER_PORT", "9"}
  };
  EXPECT_FALSE(parse_launch_env(environment).store_is_served);
  environment["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  EXPECT_TRUE(parse_launch_env(environment).store_is_served);
}

TEST(LaunchEnvTest, ChoosesTheSamePortOnAllRanksAndAnotherForAnotherJob) {
  const int port = parse_launch_env(kSlurmStep).master_port;
  EXPECT_EQ(parse_launch_env(with(kSlurmStep, {{"SLURM_PROCID", "0"}})).master_port, port);
  EXPECT_NE(parse_launch_env(with(kSlurmStep, {{"SLURM_JOB_ID", "4712"}})).master_port, port);
  EXPECT_NE(parse_launch_env(with(kSlurmStep, {{"SLURM_STEP_ID", "4"}})).master_port, port);
}

struct BadCase {
  std::string name;
  EnvironmentMap environment;
  std::vector<std::string> fragments;
};

void PrintTo(const BadCase& bad, std::ostream* stream) {
  *stream << bad.name;
}

class LaunchEnvBadTest : public ::testing::TestWithParam<BadCase> {};

TEST_P(LaunchEnvBadTest, NamesVariablesAndValues) {
  try {
    parse_launch_env(GetParam().environment);
    FAIL() << "nothing was thrown";
  } catch (const InvalidArgument& error) {
    for (const std::string& fragment : GetParam().fragments) {
      EXPECT_NE(std::string(error.what()).find(fragment), std::string::npos)
          << "no '" << fragment << "' in: " << error.what();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Mistakes,
    LaunchEnvBadTest,
    ::testing::Values(
        BadCase{"rank_without_size", {{"RANK", "1"}}, {"RANK='1'", "WORLD_SIZE is not set"}},
        BadCase{"size_without_rank", {{"WORLD_SIZE", "2"}}, {"WORLD_SIZE='2'", "RANK is not set"}},
        BadCase{
            "rank_too_large",
            {{"RANK", "2"}, {"WORLD_SIZE", "2"}},
            {"RANK='2'", "WORLD_SIZE='2'", "from 0 to 1"}
        },
        BadCase{
            "not_a_number",
            {{"RANK", "one"}, {"WORLD_SIZE", "2"}},
            {"RANK='one'", "expected an integer"}
        },
        BadCase{
            "trailing_text",
            {{"RANK", "1 "}, {"WORLD_SIZE", "2"}},
            {"RANK='1 '", "expected an integer"}
        },
        BadCase{"negative", {{"RANK", "-1"}, {"WORLD_SIZE", "2"}}, {"RANK='-1'"}},
        BadCase{"no_ranks", {{"RANK", "0"}, {"WORLD_SIZE", "0"}}, {"WORLD_SIZE='0'"}},
        BadCase{
            "no_address",
            {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "1"}},
            {"MASTER_ADDR is not set", "MASTER_PORT='1'"}
        },
        BadCase{
            "no_port",
            {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "m"}},
            {"MASTER_ADDR='m'", "MASTER_PORT is not set"}
        },
        BadCase{
            "port_out_of_range",
            {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "m"}, {"MASTER_PORT", "65536"}},
            {"MASTER_PORT='65536'", "1 to 65535"}
        },
        BadCase{
            "local_rank_too_large",
            {{"RANK", "0"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "2"}, {"LOCAL_WORLD_SIZE", "2"}},
            {"LOCAL_RANK='2'", "LOCAL_WORLD_SIZE='2'"}
        },
        BadCase{
            "local_size_too_large",
            {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "3"}},
            {"LOCAL_WORLD_SIZE='3'", "WORLD_SIZE='2'"}
        },
        BadCase{
            "mpi_on_several_hosts_without_address",
            {{"OMPI_COMM_WORLD_RANK", "0"},
             {"OMPI_COMM_WORLD_SIZE", "4"},
             {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
             {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}},
            {"OMPI_COMM_WORLD_SIZE='4'",
             "OMPI_COMM_WORLD_LOCAL_SIZE='2'",
             "MASTER_ADDR is not set",
             "mpirun -x MASTER_ADDR"}
        },
        BadCase{"pmi_without_size", {{"PMI_RANK", "0"}}, {"PMI_RANK='0'", "PMI_SIZE is not set"}},
        BadCase{"pmix_alone", {{"PMIX_RANK", "1"}}, {"PMIX_RANK='1'", "how many ranks"}},
        BadCase{
            "srun_without_size",
            {{"SLURM_PROCID", "0"}, {"SLURM_STEP_ID", "0"}},
            {"SLURM_PROCID='0'", "SLURM_NTASKS is not set"}
        },
        BadCase{
            "srun_without_nodes",
            {{"SLURM_PROCID", "0"},
             {"SLURM_NTASKS", "2"},
             {"SLURM_STEP_ID", "0"},
             {"SLURM_JOB_ID", "1"}},
            {"SLURM_STEP_NODELIST", "MASTER_ADDR"}
        },
        BadCase{
            "srun_with_malformed_nodes",
            {{"SLURM_PROCID", "0"},
             {"SLURM_NTASKS", "2"},
             {"SLURM_STEP_ID", "0"},
             {"SLURM_JOB_ID", "1"},
             {"SLURM_STEP_NODELIST", "node[3-"}},
            {"'node[3-'", "malformed"}
        }
    ),
    [](const auto& test) { return test.param.name; }
);

TEST(LaunchEnvTest, FindsTheFirstHostOfANodeList) {
  EXPECT_EQ(first_host("node7"), "node7");
  EXPECT_EQ(first_host("a,b"), "a");
  EXPECT_EQ(first_host("node[003-010,012]"), "node003");
  EXPECT_EQ(first_host("node[12,3-4],gpu7"), "node12");
  EXPECT_EQ(first_host("gpu7,node[1-2]"), "gpu7");
  EXPECT_EQ(first_host("rack[1-2]n[0-3]"), "rack1n0");
  EXPECT_EQ(first_host("node[1-3].cluster.org,x"), "node1.cluster.org");
  EXPECT_THROW(first_host(""), InvalidArgument);
  EXPECT_THROW(first_host("node[]"), InvalidArgument);
  EXPECT_THROW(first_host("node[a-b]"), InvalidArgument);
}

TEST(LaunchEnvTest, ReadsTheProcessEnvironment) {
  ::setenv("HS_LAUNCH_ENV_TEST", "a=b", 1);
  EXPECT_EQ(process_environment()["HS_LAUNCH_ENV_TEST"], "a=b");
  ::unsetenv("HS_LAUNCH_ENV_TEST");
  EXPECT_EQ(process_environment().count("HS_LAUNCH_ENV_TEST"), 0u);
}

}  // namespace
}  // namespace hypershard::comm
