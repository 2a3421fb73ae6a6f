// Joining, leaving, and choosing how the ranks of a group talk. The order of steps matters for
// whoever is left waiting: every wait here has a timeout and names the ranks that are missing.
#include "hypershard/comm/c10d/process_world.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "hypershard/comm/c10d/gloo_communicator.h"
#include "hypershard/comm/c10d/health.h"
#include "hypershard/comm/c10d/internal/backend_text.h"
#include "hypershard/comm/c10d/internal/network.h"
#include "hypershard/comm/c10d/internal/quiet_store.h"
#include "hypershard/comm/shm/shm_communicator.h"
#include "hypershard/core/clock.h"
#include "hypershard/core/env.h"
#include "hypershard/core/error.h"
#include "hypershard/core/hash.h"
#include "hypershard/core/log.h"
#include "hypershard/core/process.h"

namespace hypershard::comm {
namespace {

using StorePtr = c10::intrusive_ptr<::c10d::Store>;

// How long the host of the store waits for ranks that have finished but are slow to say so.
constexpr double kFarewellS = 5;
// The same for ranks that want to read why the job fails.
constexpr double kFailureFarewellS = 2;
// How long a rank waits for the others to join before it looks whether one of them gave up, and how
// long the store of a rank that gives up stays for that.
constexpr double kMeetSliceS = 0.25;
constexpr double kGaveUpFarewellS = 1;
// How much longer than the other ranks may take the store itself may: above the farewell.
constexpr double kAnswerS = 3;
constexpr const char* kGaveUpKey = "gave_up";
constexpr auto kPauseBeforeRetry = std::chrono::milliseconds(50);
constexpr char kSeparator = '\x1f';

std::chrono::milliseconds to_ms(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1e3));
}

std::vector<std::uint8_t> to_bytes(const std::string& text) {
  return {text.begin(), text.end()};
}

std::string to_string(const std::vector<std::uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

Backend backend_of(Backend wanted) {
  if (wanted != Backend::kAuto) {
    return wanted;
  }
  const std::string name = env::get_string("HS_COMM");
  return name == "shm" ? Backend::kShm : name == "c10d" ? Backend::kC10d : Backend::kAuto;
}

// Where a rank lives, as it tells the others.
struct Identity {
  std::string host;       // equal: the same kernel and network
  std::string supernode;  // as stated by the user, or empty
  std::string host_name;

  std::string label() const { return supernode.empty() ? "host " + host : "stated " + supernode; }
};

Identity own_identity() {
  Identity identity;
  // Emulated hosts on one machine have network namespaces of their own.
  identity.host = boot_id() + "/" + std::to_string(network_namespace());
  identity.host_name = host_name();
  if (const std::int64_t supernode = env::get_int("HS_SUPERNODE"); supernode >= 0) {
    identity.supernode = std::to_string(supernode);
  }
  return identity;
}

std::string encode(const Identity& identity) {
  return identity.host + kSeparator + identity.supernode + kSeparator + identity.host_name;
}

Identity decode(const std::string& text) {
  const std::size_t first = text.find(kSeparator);
  const std::size_t second = text.find(kSeparator, first + 1);
  return {
      text.substr(0, first), text.substr(first + 1, second - first - 1), text.substr(second + 1)
  };
}

layout::Topology topology_of(const std::vector<Identity>& identities) {
  std::vector<std::string> labels;
  for (const Identity& identity : identities) {
    labels.push_back(identity.label());
  }
  return layout::Topology::from_labels(labels);
}

bool share_host(const std::vector<Identity>& identities, const std::vector<int>& ranks) {
  return std::all_of(ranks.begin(), ranks.end(), [&](int rank) {
    return identities[static_cast<std::size_t>(rank)].host ==
           identities[static_cast<std::size_t>(ranks.front())].host;
  });
}

// A rank's connections to the job's store, and what the ranks told each other through it.
struct Membership {
  LaunchInfo info;
  double timeout_s = 0;
  Backend backend = Backend::kAuto;
  bool hosts_store = false;
  StorePtr server;  // the host's; gone at shutdown, while communicators keep `store`
  StorePtr store;
  std::shared_ptr<Health> health;
  std::vector<Identity> identities;
  std::string nonce;
};

StorePtr connect_store(const LaunchInfo& info, double timeout_s, std::optional<int> listening_fd) {
  ::c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(info.master_port);
  options.isServer = listening_fd.has_value();
  options.masterListenFd = listening_fd;
  options.waitWorkers = false;
  options.timeout = to_ms(timeout_s);
  return c10::make_intrusive<::c10d::TCPStore>(info.master_addr, options);
}

// Refuses to mix two jobs that were given one port, and two ranks that were given one number.
void check_job(const Membership& member) {
  const LaunchInfo& info = member.info;
  const std::string own = info.run_id + " of " + std::to_string(info.world_size) + " ranks";
  const std::string first = to_string(member.store->compareSet("job", to_bytes(""), to_bytes(own)));
  HS_CHECK(
      first == own,
      "comm.world: ",
      info.master_addr,
      ":",
      info.master_port,
      " serves another job: job '",
      first,
      "' (expected job '",
      own,
      "')",
      HS_HINT("give each job its own MASTER_PORT")
  );
  static const std::string process = internal::random_nonce();
  const std::string key = "rank/" + std::to_string(info.rank);
  HS_CHECK(
      to_string(member.store->compareSet(key, to_bytes(""), to_bytes(process))) == process,
      "comm.world: another process has joined this job as rank ",
      info.rank,
      HS_HINT("every process needs a RANK of its own")
  );
}

void tell_identity(Membership& member) {
  member.store->set("host/" + std::to_string(member.info.rank), to_bytes(encode(own_identity())));
  if (member.info.rank == 0) {
    member.store->set("nonce", to_bytes(internal::random_nonce()));
  }
}

// Waits for what all ranks tell. Returns false if that takes too long, or another rank says that it
// took too long for it: the ranks' clocks start one after another, and the first to give up may
// take the store along.
bool wait_for_all(const Membership& member, const std::vector<std::string>& keys) {
  const Stopwatch stopwatch;
  while (stopwatch.elapsed_s() < member.timeout_s) {
    const double left_s = member.timeout_s - stopwatch.elapsed_s();
    try {
      member.store->wait(keys, to_ms(std::max(1e-3, std::min(left_s, kMeetSliceS))));
      return true;
    } catch (const std::exception&) {
      if (member.store->check({kGaveUpKey})) {  // throws if the store is gone
        return false;
      }
    }
  }
  return false;
}

[[noreturn]] void fail_missing(const Membership& member, const std::vector<std::string>& keys) {
  std::vector<int> missing;
  for (int rank = 0; rank < member.info.world_size; ++rank) {
    if (!member.store->check({keys[static_cast<std::size_t>(rank)]})) {
      missing.push_back(rank);
    }
  }
  member.store->set(kGaveUpKey, to_bytes("1"));
  if (member.hosts_store) {
    std::this_thread::sleep_for(to_ms(kGaveUpFarewellS));
  }
  HS_FAIL(
      CommError,
      "comm.world: ranks ",
      missing,
      " of ",
      member.info.world_size,
      " did not join the job within ",
      member.timeout_s,
      " s",
      HS_HINT("look at their own output; the limit is HS_TIMEOUT_S")
  );
}

void meet(Membership& member) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < member.info.world_size; ++rank) {
    keys.push_back("host/" + std::to_string(rank));
  }
  keys.emplace_back("nonce");
  if (!wait_for_all(member, keys)) {
    fail_missing(member, keys);
  }
  std::vector<std::vector<std::uint8_t>> values = member.store->multiGet(keys);
  member.nonce = to_string(values.back());
  values.pop_back();
  for (const auto& value : values) {
    member.identities.push_back(decode(to_string(value)));
  }
}

HealthOptions health_options(const LaunchInfo& info) {
  HealthOptions options;
  options.rank = info.rank;
  options.world_size = info.world_size;
  options.store_owner = info.store_is_served ? "the launcher's agent (which serves the job's store)"
                                             : "rank 0 (which hosts the job's store)";
  return options;
}

// Says who and where this rank is, and waits until all ranks have.
void talk_to_store(Membership& member) {
  const LaunchInfo& info = member.info;
  const auto connect = [&] {
    return c10::make_intrusive<::c10d::PrefixStore>(
        "hypershard/" + std::to_string(info.restart_count),
        connect_store(info, member.timeout_s, std::nullopt)
    );
  };
  member.store = connect();
  check_job(member);
  // A connection of its own: one that hangs must not hold up the others.
  member.health = std::make_shared<Health>(connect(), health_options(info));
  tell_identity(member);
  meet(member);
}

// Most calls of the store have no timeout, and a store whose rank is stopped still accepts
// connections. So a thread of its own makes them here, which is left behind if it hangs.
void talk_within_timeout(const std::shared_ptr<Membership>& member) {
  std::packaged_task<void()> task([member] {
    const internal::QuietStore quiet;
    talk_to_store(*member);
  });
  std::future<void> done = task.get_future();
  std::thread thread(std::move(task));
  const double limit_s = member->timeout_s + kAnswerS;
  if (done.wait_for(to_ms(limit_s)) == std::future_status::timeout) {
    thread.detach();
    const LaunchInfo& info = member->info;
    HS_FAIL(
        CommError,
        "comm.world: the job's store at ",
        info.master_addr,
        ":",
        info.master_port,
        " accepts connections but has not answered for ",
        limit_s,
        " s",
        HS_HINT(
            info.store_is_served ? "is the launcher's agent stopped?"
                                 : "is rank 0, which hosts it, stopped? Or has another program the "
                                   "port? Then set MASTER_PORT to a free one"
        )
    );
  }
  thread.join();
  done.get();
}

// Goes through the store once; returns why it must be tried again, or nothing.
std::optional<std::string> try_to_enter(const std::shared_ptr<Membership>& member) {
  const LaunchInfo& info = member->info;
  const internal::QuietStore quiet;
  try {
    std::optional<int> fd;
    if (member->hosts_store) {
      fd = internal::listen_on(info.master_addr, info.master_port);
    }
    // Rank 0 goes through the address as well: what is wrong with it is said in our words.
    internal::wait_until_reachable(info.master_addr, info.master_port, member->timeout_s);
    if (member->hosts_store) {
      member->server = connect_store(info, member->timeout_s, fd);
    }
    talk_within_timeout(member);
  } catch (const c10::Error& error) {
    return internal::backend_text(error);
  }
  return std::nullopt;
}

Membership enter(const LaunchInfo& info, const WorldOptions& options) {
  const auto member = std::make_shared<Membership>();
  member->info = info;
  member->timeout_s = options.timeout_s > 0
                          ? options.timeout_s
                          : static_cast<double>(env::get_duration_ms("HS_TIMEOUT_S")) * 1e-3;
  member->backend = backend_of(options.backend);
  if (info.world_size == 1) {
    member->identities = {own_identity()};
    member->nonce = internal::random_nonce();
    return *member;
  }
  member->hosts_store = info.rank == 0 && !info.store_is_served;
  const Stopwatch stopwatch;
  // A rank that is early may meet the store of the job before, which is about to close.
  while (const auto why = try_to_enter(member)) {
    if (member->hosts_store || stopwatch.elapsed_s() >= member->timeout_s) {
      HS_FAIL(
          CommError,
          "comm.world: the job's store at ",
          info.master_addr,
          ":",
          info.master_port,
          " failed while rank ",
          info.rank,
          " joined; it said: ",
          *why
      );
    }
    member->health.reset();
    std::this_thread::sleep_for(kPauseBeforeRetry);
  }
  return *member;
}

class ProcessWorld : public World {
 public:
  explicit ProcessWorld(Membership member)
      : World(member.info.rank, topology_of(member.identities), member.timeout_s),
        member_(std::move(member)) {
    fill_local_place();
  }

  ~ProcessWorld() override {
    if (is_shut_down_ || member_.health == nullptr) {
      return;
    }
    member_.health->report_failure("it ended without World::shutdown()");
    if (member_.hosts_store) {
      member_.health->linger(kFailureFarewellS);
    }
  }

  std::string description() const override;
  void shutdown() override;

  const LaunchInfo& info() const { return member_.info; }
  Health* health() const { return member_.health.get(); }

 protected:
  std::shared_ptr<Communicator> make_communicator(GroupInfo info) override;

 private:
  void fill_local_place();
  bool uses_shared_memory(const GroupInfo& info) const;
  std::string gloo_address(const std::vector<int>& ranks) const;
  std::function<std::string(bool)> why_absent(const GroupInfo& info) const;

  Membership member_;
  bool is_shut_down_ = false;
};

void ProcessWorld::fill_local_place() {
  LaunchInfo& info = member_.info;
  const std::string& own = member_.identities[static_cast<std::size_t>(info.rank)].host;
  int num_local = 0;
  for (int other = 0; other < info.world_size; ++other) {
    const bool is_local = member_.identities[static_cast<std::size_t>(other)].host == own;
    if (is_local && other == info.rank && info.local_world_size == 0) {
      info.local_rank = num_local;
    }
    num_local += is_local ? 1 : 0;
  }
  if (info.local_world_size == 0) {
    info.local_world_size = num_local;
  }
}

std::string ProcessWorld::description() const {
  const LaunchInfo& info = member_.info;
  const std::string name = member_.identities[static_cast<std::size_t>(info.rank)].host_name;
  std::string text = concat_text(
      "rank ",
      info.rank,
      " of ",
      info.world_size,
      " (started by ",
      to_text(info.launcher),
      ") on ",
      name,
      "; ",
      topology().num_supernodes(),
      topology().num_supernodes() == 1 ? " supernode" : " supernodes"
  );
  for (int supernode = 0; supernode < topology().num_supernodes(); ++supernode) {
    text += concat_text(supernode == 0 ? ": " : ", ", topology().ranks_of(supernode));
  }
  if (info.world_size > 1) {
    text += concat_text("; store at ", info.master_addr, ":", info.master_port);
    text += info.store_is_served ? " (the launcher's)" : " (rank 0's)";
  }
  return text;
}

bool ProcessWorld::uses_shared_memory(const GroupInfo& info) const {
  const bool can_share =
      info.tier == layout::Tier::kIntra && share_host(member_.identities, info.global_ranks);
  HS_CHECK(
      can_share || member_.backend != Backend::kShm,
      "comm.world: communicator '",
      info.name,
      "' over ranks ",
      info.global_ranks,
      info.tier == layout::Tier::kIntra ? " lies on several hosts" : " crosses supernodes",
      ", where shared memory does not reach",
      HS_HINT("HS_COMM=auto takes shared memory where it can and Gloo elsewhere")
  );
  return can_share && member_.backend != Backend::kC10d;
}

std::string ProcessWorld::gloo_address(const std::vector<int>& ranks) const {
  if (share_host(member_.identities, ranks)) {
    return "127.0.0.1";
  }
  HS_CHECK(
      !internal::is_loopback(member_.info.master_addr),
      "comm.world: MASTER_ADDR='",
      member_.info.master_addr,
      "' is this host only, but ranks ",
      ranks,
      " lie on several hosts",
      HS_HINT("set MASTER_ADDR to an address of rank 0's host that the others can reach")
  );
  return internal::local_address_towards(member_.info.master_addr, member_.info.master_port);
}

std::function<std::string(bool)> ProcessWorld::why_absent(const GroupInfo& info) const {
  if (member_.health == nullptr) {
    return {};
  }
  const auto watch = std::make_shared<Health::Watch>(member_.health.get(), info.global_ranks);
  return [health = member_.health, watch, info](bool timed_out) {
    Stall stall;
    stall.note.op = concat_text("the making of group '", info.name, "'");
    stall.timed_out = timed_out;
    stall.waited_s = timed_out ? info.timeout_s : 0;
    return timed_out ? health->explain(info, stall) : health->verdict(info, stall).value_or("");
  };
}

std::shared_ptr<Communicator> ProcessWorld::make_communicator(GroupInfo info) {
  HS_CHECK(!is_shut_down_, "comm.world: the world was shut down before '", info.name, "' was made");
  std::string key;
  for (const int rank : info.global_ranks) {
    key += std::to_string(rank) + ",";
  }
  const std::string name = info.name + "/" + key;
  if (uses_shared_memory(info)) {
    ShmRendezvous rendezvous;
    rendezvous.nonce = member_.nonce + "." + std::to_string(member_.info.restart_count);
    rendezvous.why_absent = why_absent(info);
    return make_shm_communicator(std::move(info), rendezvous);
  }
  GlooOptions options;
  if (info.global_ranks.size() == 1) {
    return make_gloo_communicator(
        std::move(info), Rendezvous::in_process()->store(), name, options
    );
  }
  options.address = gloo_address(info.global_ranks);
  options.health = member_.health;
  return make_gloo_communicator(std::move(info), member_.store, "gloo/" + name, options);
}

void ProcessWorld::shutdown() {
  if (is_shut_down_) {
    return;
  }
  if (member_.health != nullptr) {
    member_.health->finish(member_.timeout_s);
    if (member_.hosts_store) {
      member_.health->linger(kFarewellS);
    }
    member_.health->leave();
  }
  is_shut_down_ = true;
  member_.store.reset();
  member_.server.reset();
}

}  // namespace

std::shared_ptr<World> join_world(const LaunchInfo& info, const WorldOptions& options) {
  set_error_rank(info.rank, info.world_size);
  const Stopwatch stopwatch;
  auto world = std::make_shared<ProcessWorld>(enter(info, options));
  HS_LOG_DEBUG("joined in ", stopwatch.elapsed_ms(), " ms: ", world->description());
  return world;
}

std::shared_ptr<World> World::join(const WorldOptions& options) {
  return join_world(parse_launch_env(process_environment()), options);
}

LaunchInfo launch_info(const World& world) {
  const auto* process = dynamic_cast<const ProcessWorld*>(&world);
  return process == nullptr ? LaunchInfo() : process->info();
}

void report_failure(World& world, std::string_view text) {
  const auto* process = dynamic_cast<const ProcessWorld*>(&world);
  if (process != nullptr && process->health() != nullptr) {
    // The reader is told the rank anyhow.
    const std::size_t end = text.starts_with("[rank ") ? text.find("] ") : std::string_view::npos;
    process->health()->report_failure(end == std::string_view::npos ? text : text.substr(end + 2));
  }
}

}  // namespace hypershard::comm
