// Leaving a job, and choosing how the ranks of a group talk; joining is in internal/membership.cpp.
#include "hypershard/comm/c10d/process_world.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "hypershard/comm/c10d/gloo_communicator.h"
#include "hypershard/comm/c10d/health.h"
#include "hypershard/comm/c10d/internal/membership.h"
#include "hypershard/comm/c10d/internal/network.h"
#include "hypershard/comm/shm/shm_communicator.h"
#include "hypershard/core/clock.h"
#include "hypershard/core/error.h"
#include "hypershard/core/log.h"

namespace hypershard::comm {
namespace {

// How long the host of the store waits for ranks that have finished but are slow to say so.
constexpr double kFarewellS = 5;
// The same for ranks that want to read why the job fails.
constexpr double kFailureFarewellS = 2;
layout::Topology topology_of(const std::vector<internal::Identity>& identities) {
  std::vector<std::string> labels;
  for (const internal::Identity& identity : identities) {
    labels.push_back(identity.label());
  }
  return layout::Topology::from_labels(labels);
}

bool share_host(const std::vector<internal::Identity>& identities, const std::vector<int>& ranks) {
  return std::all_of(ranks.begin(), ranks.end(), [&](int rank) {
    return identities[static_cast<std::size_t>(rank)].host ==
           identities[static_cast<std::size_t>(ranks.front())].host;
  });
}

// Listens to what the others say from now on; the result says why `during` does not end, if it is
// known.
std::function<std::string(bool)> why_stalled(
    const std::shared_ptr<Health>& health, const GroupInfo& info, std::string during
) {
  if (health == nullptr) {
    return {};
  }
  const auto watch = std::make_shared<Health::Watch>(health.get(), info.global_ranks);
  return [health, watch, info, during = std::move(during)](bool timed_out) {
    Stall stall;
    stall.note.op = during;
    stall.timed_out = timed_out;
    stall.waited_s = timed_out ? info.timeout_s : 0;
    return timed_out ? health->explain(info, stall) : health->verdict(info, stall).value_or("");
  };
}

class ProcessWorld : public World {
 public:
  explicit ProcessWorld(internal::Membership member)
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

  internal::Membership member_;
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
    rendezvous.why_absent =
        why_stalled(member_.health, info, concat_text("the making of group '", info.name, "'"));
    if (member_.health != nullptr) {
      rendezvous.watch_stall = [health = member_.health, info](std::string during) {
        return [why = why_stalled(health, info, std::move(during))] {
          return why(/*timed_out=*/true);
        };
      };
    }
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
  if (info.tier == layout::Tier::kInter) {
    options.link_delay = link_delay_from_env(static_cast<std::uint64_t>(member_.info.rank));
  }
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
  auto world = std::make_shared<ProcessWorld>(internal::join_job(info, options));
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
