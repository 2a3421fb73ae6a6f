// Why: ranks of one host that are processes, related or not, and read each other's memory in place.
// What the process world puts inside a supernode.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "hypershard/comm/communicator.h"

namespace hypershard::comm {

/// How the processes of a group find each other. Equal on all ranks of the group.
struct ShmRendezvous {
  /// Names the job on this host: what no other job has, and its restart count.
  std::string nonce;
  std::int64_t staging_bytes = std::int64_t{8} << 20;  ///< a rank, for tensors in private memory
  std::int64_t step_bytes = std::int64_t{1} << 20;     ///< staged at once
  /// Asked again and again while ranks are missing: why they cannot come, "" if nothing is known.
  /// At the end of the wait with `timed_out`: it may then look for as long as that helps.
  std::function<std::string(bool timed_out)> why_absent = {};
  /// Begun when a wait of the group is long: looks around in the rest of the job. What it returns
  /// is asked once, when the wait has timed out, and says what the group's ranks may be waiting
  /// for.
  std::function<std::function<std::string()>(std::string during)> watch_stall = {};
};

/// Joins the ranks of `info` over shared memory.
///
/// Memory is memfd pages, handed over as descriptors through abstract Unix sockets, so nothing has
/// a name in /dev/shm and nothing outlives the processes. The sockets stay open: a rank that dies
/// is seen by its peers within milliseconds, and every collective that needs it fails with its
/// name.
/// Collective: all ranks of the group, on one host (one kernel and network namespace), with one
/// nonce; a nonce and group may be used again once the communicator is gone on all ranks.
/// Errors: CommError naming the ranks that do not come within info.timeout_s or are known not to,
/// that run under another user, or whose memory cannot be mapped; InvalidArgument for an empty
/// nonce.
std::shared_ptr<Communicator> make_shm_communicator(
    GroupInfo info, const ShmRendezvous& rendezvous
);

}  // namespace hypershard::comm
