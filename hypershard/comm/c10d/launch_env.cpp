// Each launcher has a reader that turns its variables into the same struct; the order in which they
// are tried matters where launchers nest (mpirun inside a Slurm allocation, torchrun under srun).
#include "hypershard/comm/c10d/launch_env.h"

#include <algorithm>
#include <charconv>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <unistd.h>
#include <utility>
#include <vector>

#include "hypershard/core/error.h"
#include "hypershard/core/hash.h"

namespace hypershard::comm {
namespace {

constexpr int kMaxRanks = 1 << 24;
constexpr int kMaxPort = 65535;
// Ports that we choose ourselves lie below the ports that Linux hands to outgoing connections.
constexpr int kFirstOwnPort = 20000;
constexpr int kNumOwnPorts = 12000;

// Looks variables up and remembers nothing: errors print name and value.
class Variables {
 public:
  explicit Variables(const EnvironmentMap& environment) : environment_(environment) {}

  bool has(const std::string& name) const { return !text(name).empty(); }

  std::string text(const std::string& name) const {
    const auto found = environment_.find(name);
    return found == environment_.end() ? std::string() : found->second;
  }

  std::string shown(const std::string& name) const {
    return has(name) ? name + "='" + text(name) + "'" : name + " is not set";
  }

  std::optional<std::int64_t> integer(const std::string& name, std::int64_t low, std::int64_t high)
      const {
    if (!has(name)) {
      return std::nullopt;
    }
    const std::string value = text(name);
    std::int64_t number = 0;
    const char* end = value.data() + value.size();
    const auto [stop, error] = std::from_chars(value.data(), end, number);
    HS_CHECK(
        error == std::errc() && stop == end && number >= low && number <= high,
        "comm.launch: ",
        shown(name),
        " is not usable (expected an integer from ",
        low,
        " to ",
        high,
        ")"
    );
    return number;
  }

  int required(const std::string& name, int low, int high, const std::string& because) const {
    const auto number = integer(name, low, high);
    HS_CHECK(
        number.has_value(),
        "comm.launch: ",
        because,
        ", but ",
        name,
        " is not set",
        HS_HINT("a launcher sets both; unset the other to run a single rank")
    );
    return static_cast<int>(*number);
  }

  // Returns the first of `names` that is set.
  std::optional<std::string> first_of(std::initializer_list<const char*> names) const {
    for (const char* name : names) {
      if (has(name)) {
        return name;
      }
    }
    return std::nullopt;
  }

 private:
  const EnvironmentMap& environment_;
};

int own_port(std::string_view seed) {
  return kFirstOwnPort + static_cast<int>(hash_bytes(seed) % kNumOwnPorts);
}

// Names of the variables that hold a rank's place, for the checks that all launchers share.
struct PlaceNames {
  std::string rank;
  std::string world_size;
  std::string local_rank;
  std::string local_world_size;
};

void read_place(const Variables& variables, const PlaceNames& names, LaunchInfo& info) {
  info.world_size = variables.required(names.world_size, 1, kMaxRanks, variables.shown(names.rank));
  info.rank = variables.required(names.rank, 0, kMaxRanks, variables.shown(names.world_size));
  HS_CHECK(
      info.rank < info.world_size,
      "comm.launch: ",
      variables.shown(names.rank),
      " does not fit ",
      variables.shown(names.world_size),
      " (expected a rank from 0 to ",
      info.world_size - 1,
      ")"
  );
  const auto local_world_size = variables.integer(names.local_world_size, 1, kMaxRanks);
  const auto local_rank = variables.integer(names.local_rank, 0, kMaxRanks);
  info.local_world_size = static_cast<int>(local_world_size.value_or(info.world_size == 1 ? 1 : 0));
  info.local_rank = static_cast<int>(local_rank.value_or(0));
  HS_CHECK(
      info.local_world_size <= info.world_size,
      "comm.launch: ",
      variables.shown(names.local_world_size),
      " is more than ",
      variables.shown(names.world_size)
  );
  HS_CHECK(
      info.local_world_size == 0 || info.local_rank < info.local_world_size,
      "comm.launch: ",
      variables.shown(names.local_rank),
      " does not fit ",
      info.local_world_size,
      " ranks on this host (",
      variables.shown(names.local_world_size),
      ")"
  );
}

// Reads MASTER_ADDR and MASTER_PORT; what is missing is left for the caller.
void read_master(const Variables& variables, LaunchInfo& info) {
  info.master_addr = variables.text("MASTER_ADDR");
  info.master_port = static_cast<int>(variables.integer("MASTER_PORT", 1, kMaxPort).value_or(0));
}

LaunchInfo from_torchrun(const Variables& variables) {
  LaunchInfo info;
  info.launcher = variables.has("HS_JOB_NONCE") ? Launcher::kHypershard : Launcher::kTorchrun;
  read_place(variables, {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}, info);
  if (info.world_size > 1) {
    read_master(variables, info);
    HS_CHECK(
        !info.master_addr.empty() && info.master_port != 0,
        "comm.launch: ",
        variables.shown("WORLD_SIZE"),
        " needs the address of rank 0, but ",
        variables.shown("MASTER_ADDR"),
        " and ",
        variables.shown("MASTER_PORT"),
        HS_HINT("start the ranks with torchrun, srun, mpirun or `hypershard --ranks N`")
    );
  }
  info.store_is_served = variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  info.restart_count =
      static_cast<int>(variables.integer("TORCHELASTIC_RESTART_COUNT", 0, kMaxRanks).value_or(0));
  info.run_id = variables.text("TORCHELASTIC_RUN_ID");
  return info;
}

// MPI launchers name no address: one host is enough to know it, more hosts need the user's word.
void find_mpi_master(const Variables& variables, const PlaceNames& names, LaunchInfo& info) {
  if (info.world_size == 1) {
    return;
  }
  read_master(variables, info);
  if (info.master_addr.empty()) {
    HS_CHECK(
        info.local_world_size == info.world_size,
        "comm.launch: mpirun started ",
        info.world_size,
        " ranks (",
        variables.shown(names.world_size),
        "), not all on this host (",
        variables.shown(names.local_world_size),
        "), and ",
        variables.shown("MASTER_ADDR"),
        HS_HINT(
            "give every rank the address of rank 0's host: mpirun -x MASTER_ADDR=… (Open MPI) or "
            "-env MASTER_ADDR … (MPICH)"
        )
    );
    info.master_addr = "127.0.0.1";
  }
  if (info.master_port == 0) {
    info.master_port = own_port("mpi/" + info.run_id);
  }
}

LaunchInfo from_open_mpi(const Variables& variables) {
  const PlaceNames names{
      "OMPI_COMM_WORLD_RANK",
      "OMPI_COMM_WORLD_SIZE",
      "OMPI_COMM_WORLD_LOCAL_RANK",
      "OMPI_COMM_WORLD_LOCAL_SIZE"
  };
  LaunchInfo info;
  info.launcher = Launcher::kMpi;
  read_place(variables, names, info);
  // Open MPI 5 and 4 name the job in different variables.
  const auto job =
      variables.first_of({"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"});
  info.run_id = job ? variables.text(*job) : std::string();
  find_mpi_master(variables, names, info);
  return info;
}

LaunchInfo from_pmi(const Variables& variables) {
  // Hydra (MPICH, Intel MPI) and Cray's launcher name the local place differently.
  const PlaceNames names{
      "PMI_RANK",
      "PMI_SIZE",
      variables.first_of({"MPI_LOCALRANKID", "PMI_LOCAL_RANK"}).value_or("MPI_LOCALRANKID"),
      variables.first_of({"MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"}).value_or("MPI_LOCALNRANKS")
  };
  LaunchInfo info;
  info.launcher = Launcher::kMpi;
  read_place(variables, names, info);
  info.run_id = variables.text("PMI_JOBID");
  find_mpi_master(variables, names, info);
  return info;
}

// Expands Slurm's `2(x3),1` (tasks on each node) and returns the entry of one node, 0 if there is
// none.
int tasks_on_node(const std::string& text, std::int64_t node) {
  std::size_t at = 0;
  const auto number = [&]() -> std::int64_t {
    std::int64_t value = 0;
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + at, end, value);
    at = error == std::errc() ? static_cast<std::size_t>(stop - text.data()) : text.size() + 1;
    return value;
  };
  while (at < text.size()) {
    const std::int64_t tasks = number();
    std::int64_t repeat = 1;
    if (text.compare(std::min(at, text.size()), 2, "(x") == 0) {
      at += 2;
      repeat = number();
      ++at;  // the closing parenthesis
    }
    if (node < repeat) {
      return at > text.size() + 1 ? 0 : static_cast<int>(tasks);
    }
    node -= repeat;
    ++at;  // the comma
  }
  return 0;
}

LaunchInfo from_slurm(const Variables& variables) {
  LaunchInfo info;
  info.launcher = Launcher::kSlurm;
  const std::string size_name =
      variables.has("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  read_place(variables, {"SLURM_PROCID", size_name, "SLURM_LOCALID", ""}, info);
  const auto tasks = variables.first_of({"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"});
  if (const auto node = variables.integer("SLURM_NODEID", 0, kMaxRanks); node && tasks) {
    info.local_world_size = tasks_on_node(variables.text(*tasks), *node);
  }
  info.run_id = variables.text("SLURM_JOB_ID") + "." + variables.text("SLURM_STEP_ID");
  info.restart_count =
      static_cast<int>(variables.integer("SLURM_RESTART_COUNT", 0, kMaxRanks).value_or(0));
  if (info.world_size == 1) {
    return info;
  }
  read_master(variables, info);
  if (info.master_addr.empty()) {
    const auto list = variables.first_of({"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"});
    HS_CHECK(
        list.has_value(),
        "comm.launch: srun started ",
        info.world_size,
        " ranks but none of SLURM_STEP_NODELIST, SLURM_JOB_NODELIST and MASTER_ADDR is set",
        HS_HINT("export MASTER_ADDR with the host of rank 0")
    );
    info.master_addr = first_host(variables.text(*list));
  }
  if (info.master_port == 0) {
    HS_CHECK(
        variables.has("SLURM_JOB_ID"),
        "comm.launch: ",
        variables.shown("SLURM_JOB_ID"),
        " and ",
        variables.shown("MASTER_PORT"),
        ": no port for the job's store (expected one of the two)"
    );
    info.master_port = own_port("slurm/" + info.run_id);
  }
  return info;
}

bool is_slurm_step(const Variables& variables) {
  // A batch script has SLURM_PROCID=0 and SLURM_NTASKS=N as well, but no step.
  return variables.has("SLURM_PROCID") &&
         (variables.has("SLURM_STEP_ID") || variables.has("SLURM_STEP_NODELIST"));
}

LaunchInfo from_launcher(const Variables& variables) {
  if (variables.has("RANK") || variables.has("WORLD_SIZE")) {
    return from_torchrun(variables);
  }
  if (variables.has("OMPI_COMM_WORLD_RANK") || variables.has("OMPI_COMM_WORLD_SIZE")) {
    return from_open_mpi(variables);
  }
  // srun --mpi=pmi2 sets PMI_* too, and then Slurm's variables say more; under MPICH's mpirun in a
  // Slurm allocation they describe the proxies, not the ranks.
  const bool has_pmi = variables.has("PMI_RANK") || variables.has("PMI_SIZE");
  const bool slurm_agrees = is_slurm_step(variables) &&
                            variables.text("PMI_RANK") == variables.text("SLURM_PROCID") &&
                            variables.text("PMI_SIZE") == variables.text("SLURM_NTASKS");
  if (has_pmi && !slurm_agrees) {
    return from_pmi(variables);
  }
  if (is_slurm_step(variables)) {
    return from_slurm(variables);
  }
  HS_CHECK(
      !variables.has("PMIX_RANK"),
      "comm.launch: ",
      variables.shown("PMIX_RANK"),
      " but nothing says how many ranks there are (looked for OMPI_COMM_WORLD_SIZE, PMI_SIZE and "
      "SLURM_NTASKS of a step)",
      HS_HINT("set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT yourself")
  );
  return {};
}

}  // namespace

std::string to_text(Launcher launcher) {
  switch (launcher) {
    case Launcher::kNone:
      return "none";
    case Launcher::kHypershard:
      return "hypershard";
    case Launcher::kTorchrun:
      return "torchrun";
    case Launcher::kMpi:
      return "mpirun";
    case Launcher::kSlurm:
      return "srun";
  }
  return "?";
}

EnvironmentMap process_environment() {
  EnvironmentMap environment;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::size_t equals = text.find('=');
    if (equals != std::string_view::npos) {
      environment.emplace(text.substr(0, equals), text.substr(equals + 1));
    }
  }
  return environment;
}

LaunchInfo parse_launch_env(const EnvironmentMap& environment) {
  const Variables variables(environment);
  LaunchInfo info = from_launcher(variables);
  if (variables.has("HS_JOB_NONCE")) {
    info.run_id = variables.text("HS_JOB_NONCE");
  }
  return info;
}

std::string first_host(const std::string& node_list) {
  const std::size_t open = node_list.find('[');
  const std::size_t comma = node_list.find(',');
  std::string host = node_list.substr(0, std::min(open, comma));
  bool is_well_formed = true;
  if (open < comma) {
    const std::size_t close = node_list.find(']', open);
    is_well_formed = close != std::string::npos;
    if (is_well_formed) {
      const std::string inside = node_list.substr(open + 1, close - open - 1);
      const std::string number = inside.substr(0, inside.find_first_of(",-"));
      is_well_formed =
          !number.empty() && number.find_first_not_of("0123456789") == std::string::npos;
      // What follows the bracket up to the next comma belongs to the name: `rack[1-2]n[0-3]`.
      const std::string rest = node_list.substr(close + 1);
      const bool ends_here = rest.empty() || rest.front() == ',';
      host += number + (is_well_formed && !ends_here ? first_host(rest) : std::string());
    }
  }
  HS_CHECK(
      is_well_formed && !host.empty(),
      "comm.launch: node list '",
      node_list,
      "' is malformed (expected the form node[003-010,012],gpu7)"
  );
  return host;
}

}  // namespace hypershard::comm
