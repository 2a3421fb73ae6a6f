// Makes Gloo's process group and decides which of our two kinds of communicator speaks through a
// back end.
#include "hypershard/comm/c10d/gloo_communicator.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <signal.h>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "hypershard/comm/c10d/health.h"
#include "hypershard/comm/c10d/internal/backend_text.h"
#include "hypershard/comm/c10d/internal/collective_communicator.h"
#include "hypershard/comm/c10d/internal/message_communicator.h"
#include "hypershard/core/clock.h"
#include "hypershard/core/error.h"

namespace hypershard::comm {
namespace {

// Gloo writes to sockets without asking for EPIPE: a peer that is gone would kill this process.
// Python ignores the signal for everybody; a C++ program that has its own handler keeps it.
void ignore_broken_pipes() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action = {};
    if (::sigaction(SIGPIPE, nullptr, &action) == 0 && action.sa_handler == SIG_DFL) {
      ::signal(SIGPIPE, SIG_IGN);
    }
  });
}

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  while (begin <= list.size()) {
    const std::size_t end = std::min(list.find(',', begin), list.size());
    if (end > begin) {
      parts.push_back(list.substr(begin, end - begin));
    }
    begin = end + 1;
  }
  return parts;
}

/// Says why a group cannot be connected; `text` is what is known of it.
[[noreturn]] void fail_to_connect(
    const GroupInfo& info, Health* health, const std::string& text, double waited_s
) {
  std::string why;
  if (health != nullptr) {
    Stall stall;
    stall.note.op = "connecting '" + info.name + "'";
    stall.transport_text = text;
    stall.timed_out = waited_s > 0;
    stall.waited_s = waited_s;
    why = health->explain(info, stall) + "; ";
    health->report_failure(why);
  }
  HS_FAIL(
      CommError,
      "comm.c10d: cannot connect the ranks ",
      info.global_ranks,
      " of '",
      info.name,
      "' over Gloo: ",
      why,
      text,
      HS_HINT("GLOO_SOCKET_IFNAME names the network interface to use")
  );
}

/// Waits until all ranks are about to connect. Gloo itself would wait for a rank that has failed
/// until the timeout.
void await_peers(
    const GroupInfo& info, ::c10d::Store& store, const std::string& prefix, Health* health
) {
  std::vector<std::string> keys;
  for (std::size_t rank = 0; rank < info.global_ranks.size(); ++rank) {
    keys.push_back(prefix + "/here/" + std::to_string(rank));
  }
  store.set(keys[static_cast<std::size_t>(info.rank)], std::vector<std::uint8_t>{1});
  std::optional<Health::Watch> watch;
  const Stopwatch stopwatch;
  Stall stall;
  stall.note.op = "connecting '" + info.name + "'";
  for (int round = 0; !store.check(keys); ++round) {
    if (health != nullptr && !watch) {
      watch.emplace(health, info.global_ranks);
    }
    if (const auto why = health == nullptr ? std::nullopt : health->verdict(info, stall)) {
      HS_FAIL(CommError, "comm.c10d: cannot connect the ranks of '", info.name, "': ", *why);
    }
    if (stopwatch.elapsed_s() > info.timeout_s) {
      std::string absent;
      for (std::size_t rank = 0; rank < keys.size(); ++rank) {
        absent += store.check({keys[rank]}) ? "" : " " + std::to_string(info.global_ranks[rank]);
      }
      fail_to_connect(info, health, "not there after the timeout: rank" + absent, info.timeout_s);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(std::min(1 + round, 20)));
  }
}

c10::intrusive_ptr<::c10d::Backend> connect_gloo(
    const GroupInfo& info,
    const c10::intrusive_ptr<::c10d::Store>& store,
    const std::string& prefix,
    const GlooOptions& given
) {
  using ::c10d::ProcessGroupGloo;
  const auto timeout = std::chrono::milliseconds(static_cast<std::int64_t>(info.timeout_s * 1e3));
  auto options = ProcessGroupGloo::Options::create(timeout);
  options->threads = 1;  // idle: we never call Gloo's own collectives
  const char* interfaces = std::getenv("GLOO_SOCKET_IFNAME");
  for (const std::string& interface : split(interfaces == nullptr ? "" : interfaces)) {
    options->devices.push_back(ProcessGroupGloo::createDeviceForInterface(interface));
  }
  if (options->devices.empty()) {
    options->devices.push_back(ProcessGroupGloo::createDeviceForHostname(
        given.address.empty() ? "127.0.0.1" : given.address
    ));
  }
  await_peers(info, *store, prefix, given.health.get());
  auto prefixed = c10::make_intrusive<::c10d::PrefixStore>(prefix, store);
  return c10::make_intrusive<ProcessGroupGloo>(
      prefixed, info.rank, static_cast<int>(info.global_ranks.size()), options
  );
}

}  // namespace

Rendezvous::Rendezvous(c10::intrusive_ptr<::c10d::Store> store) : store_(std::move(store)) {
  HS_CHECK(store_ != nullptr, "comm.c10d: the store is null");
}

Rendezvous::~Rendezvous() = default;

std::shared_ptr<Rendezvous> Rendezvous::in_process() {
  return std::make_shared<Rendezvous>(c10::make_intrusive<::c10d::HashStore>());
}

std::shared_ptr<Communicator> make_gloo_communicator(
    GroupInfo info,
    const c10::intrusive_ptr<::c10d::Store>& store,
    const std::string& prefix,
    const GlooOptions& options
) {
  HS_CHECK(store != nullptr, "comm.c10d: the store of communicator '", info.name, "' is null");
  c10::intrusive_ptr<::c10d::Backend> backend;
  if (info.global_ranks.size() > 1) {
    ignore_broken_pipes();
    try {
      backend = connect_gloo(info, store, prefix, options);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      fail_to_connect(
          info, options.health.get(), "the back end said: " + internal::backend_text(error), 0
      );
    }
  }
  return std::make_shared<internal::MessageCommunicator>(
      std::move(info), std::move(backend), "c10d:gloo", options.health, options.link_delay
  );
}

std::shared_ptr<Communicator> wrap_backend(
    GroupInfo info, c10::intrusive_ptr<::c10d::Backend> backend, BackendStyle style
) {
  HS_CHECK(backend != nullptr, "comm.c10d: the back end of communicator '", info.name, "' is null");
  HS_CHECK_EQ(
      backend->getSize(),
      static_cast<int>(info.global_ranks.size()),
      "comm.c10d: the back end '",
      backend->getBackendName(),
      "' does not have the size of communicator '",
      info.name,
      "'"
  );
  HS_CHECK_EQ(
      backend->getRank(),
      info.rank,
      "comm.c10d: the back end '",
      backend->getBackendName(),
      "' does not have this rank's number in communicator '",
      info.name,
      "'"
  );
  const std::string name = "c10d:" + backend->getBackendName();
  const bool is_gloo = backend->getBackendName() == ::c10d::GLOO_BACKEND_NAME;
  if (style == BackendStyle::kMessages || (style == BackendStyle::kAuto && is_gloo)) {
    ignore_broken_pipes();
    return std::make_shared<internal::MessageCommunicator>(
        std::move(info), std::move(backend), name, nullptr
    );
  }
  return std::make_shared<internal::CollectiveCommunicator>(
      std::move(info), std::move(backend), name
  );
}

}  // namespace hypershard::comm
