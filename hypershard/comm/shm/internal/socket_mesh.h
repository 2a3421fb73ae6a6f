// Why: ranks that are processes find each other, hand over memory and see each other die through
// sockets without a name in the file system.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "hypershard/comm/communicator.h"
#include "hypershard/comm/shm/internal/memfd.h"

namespace hypershard::comm::internal {

/// What travels over a socket. Fixed size; one packet.
struct MeshMessage {
  enum class Kind : std::uint32_t { kHello, kOffer, kAnswer, kVerdict };
  Kind kind = Kind::kHello;
  std::uint32_t failed = 0;
  std::uint64_t group = 0;  ///< kHello: hash of nonce and group
  std::int64_t rank = 0;    ///< kHello: the sender
  std::int64_t index = 0;   ///< the others: number of the allocation
  std::int64_t bytes = 0;
  std::uint32_t use = 0;
  char text[228] = {};  ///< what the allocation is for, or what went wrong

  void set_text(std::string_view value);
};
static_assert(sizeof(MeshMessage) == 272);

/// A connection to every other rank of a group on this host.
///
/// Abstract Unix sockets, named after the nonce, the group and the rank; peers must run under the
/// same user. They stay open for the mesh's life, and the kernel closes them when a process ends,
/// however it ends.
/// Threads: one.
class SocketMesh {
 public:
  using WhyAbsent = std::function<std::string(bool timed_out)>;  ///< see ShmRendezvous

  /// Collective. Errors: CommError naming the ranks that did not come within info.timeout_s, or why
  /// they cannot, a name that is taken, or a peer of another user.
  SocketMesh(const GroupInfo& info, const std::string& nonce, const WhyAbsent& why_absent);

  /// Sends a message and, unless it is -1, a file descriptor. Errors: CommError if the peer is
  /// gone.
  void send(int peer, const MeshMessage& message, int fd = -1);
  /// Waits for a message, and the descriptor that came with it. Calls `progress` while it waits.
  /// Errors: CommError if `peer` dies or is silent for the time-out; what `progress` throws.
  MeshMessage receive(
      int peer, std::string_view what, const std::function<void()>& progress, OwnedFd* fd = nullptr
  );
  /// Returns the peers whose ends are closed.
  std::vector<int> lost_peers() const;

 private:
  void connect_all(const std::string& nonce, const WhyAbsent& why_absent);
  void check_absent(const WhyAbsent& why_absent, bool timed_out) const;
  void listen_as(const std::string& name);
  bool try_connect(int peer, const std::string& name);
  void accept_one();
  void check_user(int fd) const;
  std::string missing_text() const;
  std::string rank_text(int rank) const;

  GroupInfo info_;
  std::uint64_t group_ = 0;
  OwnedFd listener_;
  std::vector<OwnedFd> peers_;  ///< by rank; none for this rank
};

}  // namespace hypershard::comm::internal
