// Collectives over the process groups of libtorch: Gloo, which is inside every libtorch, and any
// `c10d::Backend` that the caller brings. Whatever cannot map a peer's memory talks through these.
#pragma once

#include <memory>
#include <string>

#include <c10/util/intrusive_ptr.h>

#include "hypershard/comm/c10d/link_delay.h"
#include "hypershard/comm/communicator.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace hypershard::comm {

class Health;

/// Where the ranks of a group find each other: a c10d store behind a handle that needs no c10d
/// header.
class Rendezvous {
 public:
  /// Wraps a store of the caller's. Errors: InvalidArgument if it is null.
  explicit Rendezvous(c10::intrusive_ptr<::c10d::Store> store);
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  /// Makes a store in memory, for ranks that are threads of this process.
  static std::shared_ptr<Rendezvous> in_process();

  const c10::intrusive_ptr<::c10d::Store>& store() const { return store_; }

 private:
  c10::intrusive_ptr<::c10d::Store> store_;
};

/// How a Gloo communicator reaches its peers.
struct GlooOptions {
  /// Address of this host that peers can connect to; empty: 127.0.0.1. GLOO_SOCKET_IFNAME (one or
  /// several interfaces, separated by commas) comes before it.
  std::string address;
  /// Who tells why a peer is silent; null: messages name the ranks that are waited for, not why.
  std::shared_ptr<Health> health;
  /// Holds messages back, for emulated clusters.
  LinkDelay link_delay = {};
};

/// Connects the ranks of a group over TCP.
///
/// Every message goes from tensor to socket and from socket to tensor; sums happen piece by piece
/// as pieces arrive, on the communicator's own thread, so a caller may compute while traffic goes
/// on and need not poll. Tensors must be on the CPU. Collective: all ranks of `info`, with one
/// `prefix` that no other communicator in the store has. Errors:     CommError if a peer does not
/// appear within info.timeout_s or an address is unusable.
std::shared_ptr<Communicator> make_gloo_communicator(
    GroupInfo info,
    const c10::intrusive_ptr<::c10d::Store>& store,
    const std::string& prefix,
    const GlooOptions& options = {}
);

/// How the collectives of a wrapped back end are put together.
enum class BackendStyle {
  kAuto,         ///< kMessages for Gloo, kCollectives for all others
  kMessages,     ///< send and recv with tags: the back end must match them by tag, in any order
  kCollectives,  ///< all-gather, all-to-all, broadcast and barrier of the back end
};

/// Wraps a back end of the caller's own (NCCL, HCCL, XCCL, MPI, UCC …).
///
/// The same results as everywhere: sums are an all-to-all and an ordered local sum in fp32. With
/// kCollectives a work advances only inside test(), wait() and the start of the next collective, on
/// the calling thread, so that sums are queued on the caller's current stream; starting a
/// collective while an all-reduce is in flight waits for that all-reduce's first half. No health: a
/// back end that loses a peer reports it in its own words, and CommError carries them. Errors:
/// InvalidArgument if the back end is null or its rank or size is not the group's.
std::shared_ptr<Communicator> wrap_backend(
    GroupInfo info,
    c10::intrusive_ptr<::c10d::Backend> backend,
    BackendStyle style = BackendStyle::kAuto
);

}  // namespace hypershard::comm
