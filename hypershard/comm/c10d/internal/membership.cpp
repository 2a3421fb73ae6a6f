// The order of steps matters for whoever is left waiting: every wait here has a timeout and names
// the ranks that are missing.
#include "hypershard/comm/c10d/internal/membership.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <optional>
#include <thread>
#include <utility>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "hypershard/comm/c10d/internal/backend_text.h"
#include "hypershard/comm/c10d/internal/network.h"
#include "hypershard/comm/c10d/internal/quiet_store.h"
#include "hypershard/core/clock.h"
#include "hypershard/core/env.h"
#include "hypershard/core/error.h"
#include "hypershard/core/process.h"

namespace hypershard::comm::internal {

namespace {

using StorePtr = c10::intrusive_ptr<::c10d::Store>;

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

std::string to_word(Backend backend) {
  return backend == Backend::kShm ? "shm" : backend == Backend::kC10d ? "c10d" : "auto";
}

Identity own_identity(Backend backend) {
  Identity identity;
  identity.backend = to_word(backend);
  // Emulated hosts on one machine have network namespaces of their own.
  identity.host = boot_id() + "/" + std::to_string(network_namespace());
  identity.host_name = host_name();
  if (const std::int64_t supernode = env::get_int("HS_SUPERNODE"); supernode >= 0) {
    identity.supernode = std::to_string(supernode);
  }
  return identity;
}

std::string encode(const Identity& identity) {
  return identity.host + kSeparator + identity.supernode + kSeparator + identity.backend +
         kSeparator + identity.host_name;
}

Identity decode(const std::string& text) {
  const std::size_t first = text.find(kSeparator);
  const std::size_t second = text.find(kSeparator, first + 1);
  const std::size_t third = text.find(kSeparator, second + 1);
  return {
      .host = text.substr(0, first),
      .supernode = text.substr(first + 1, second - first - 1),
      .host_name = text.substr(third + 1),
      .backend = text.substr(second + 1, third - second - 1)
  };
}

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
  static const std::string process = random_nonce();
  const std::string key = "rank/" + std::to_string(info.rank);
  HS_CHECK(
      to_string(member.store->compareSet(key, to_bytes(""), to_bytes(process))) == process,
      "comm.world: another process has joined this job as rank ",
      info.rank,
      HS_HINT("every process needs a RANK of its own")
  );
}

void tell_identity(Membership& member) {
  member.store->set(
      "host/" + std::to_string(member.info.rank), to_bytes(encode(own_identity(member.backend)))
  );
  if (member.info.rank == 0) {
    member.store->set("nonce", to_bytes(random_nonce()));
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

// Ranks with different back ends would wait for each other in different places until the timeout.
void check_backends(const Membership& member) {
  const std::string& first = member.identities.front().backend;
  const auto other = std::find_if(
      member.identities.begin(),
      member.identities.end(),
      [&](const Identity& identity) { return identity.backend != first; }
  );
  if (other == member.identities.end()) {
    return;
  }
  if (member.hosts_store) {
    std::this_thread::sleep_for(to_ms(kGaveUpFarewellS));  // the others are to read it as well
  }
  HS_FAIL(
      InvalidArgument,
      "comm.world: the ranks were told different back ends: rank 0 has ",
      first,
      ", rank ",
      other - member.identities.begin(),
      " has ",
      other->backend,
      HS_HINT("give every rank the same HS_COMM and parallel.backend")
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
  check_backends(member);
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
    const QuietStore quiet;
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
  const QuietStore quiet;
  try {
    std::optional<int> fd;
    if (member->hosts_store) {
      fd = listen_on(info.master_addr, info.master_port);
    }
    // Rank 0 goes through the address as well: what is wrong with it is said in our words.
    wait_until_reachable(info.master_addr, info.master_port, member->timeout_s);
    if (member->hosts_store) {
      member->server = connect_store(info, member->timeout_s, fd);
    }
    talk_within_timeout(member);
  } catch (const c10::Error& error) {
    return backend_text(error);
  }
  return std::nullopt;
}

}  // namespace

Membership join_job(const LaunchInfo& info, const WorldOptions& options) {
  const auto member = std::make_shared<Membership>();
  member->info = info;
  member->timeout_s = options.timeout_s > 0
                          ? options.timeout_s
                          : static_cast<double>(env::get_duration_ms("HS_TIMEOUT_S")) * 1e-3;
  member->backend = backend_of(options.backend);
  if (info.world_size == 1) {
    member->identities = {own_identity(member->backend)};
    member->nonce = random_nonce();
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

}  // namespace hypershard::comm::internal
