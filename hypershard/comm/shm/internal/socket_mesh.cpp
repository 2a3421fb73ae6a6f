// Why: see socket_mesh.h. The higher rank of a pair connects, the lower one accepts; nobody has to
// come first.
#include "hypershard/comm/shm/internal/socket_mesh.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <utility>

#include "hypershard/core/clock.h"
#include "hypershard/core/error.h"
#include "hypershard/core/hash.h"

namespace hypershard::comm::internal {
namespace {

constexpr int kSliceMs = 5;
constexpr int kHelloMs = 2000;
constexpr std::size_t kNonceText = 48;  // names of sockets end at 107 bytes

/// Returns what all ranks of the group, and nobody else, agree on.
std::uint64_t group_hash(const GroupInfo& info, const std::string& nonce) {
  std::uint64_t hash = hash_combine(hash_bytes(nonce), nonce.size());
  hash = hash_combine(hash_bytes(info.name, hash), info.name.size());
  for (const int rank : info.global_ranks) {
    hash = hash_combine(hash, static_cast<std::uint64_t>(rank));
  }
  return hash;
}

std::string hex(std::uint64_t value) {
  std::string text;
  for (int shift = 60; shift >= 0; shift -= 4) {
    text += "0123456789abcdef"[(value >> shift) & 0xfU];
  }
  return text;
}

struct Address {
  sockaddr_un storage{};
  socklen_t length = 0;
};

/// Returns the address of a name that lives in the network namespace, not in a folder.
Address abstract_address(const std::string& name) {
  Address address;
  address.storage.sun_family = AF_UNIX;
  std::memcpy(address.storage.sun_path + 1, name.data(), name.size());
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

OwnedFd make_socket(const std::string& group) {
  OwnedFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) {
    HS_FAIL(CommError, "comm.shm: cannot make a socket for '", group, "': ", errno_text(errno));
  }
  return fd;
}

/// Waits until the socket has something; false if not within `timeout_ms`.
bool readable(int fd, int timeout_ms) {
  pollfd entry{fd, POLLIN, 0};
  return poll(&entry, 1, timeout_ms) > 0;
}

/// Returns the descriptor in a received message, if one came along.
OwnedFd descriptor_of(msghdr& header) {
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level == SOL_SOCKET && part->cmsg_type == SCM_RIGHTS) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part), sizeof(fd));
      return OwnedFd(fd);
    }
  }
  return OwnedFd();
}

/// Receives one packet; returns the bytes received, 0 at the end, -1 with errno set.
ssize_t receive_packet(int fd, MeshMessage& message, OwnedFd* descriptor) {
  iovec part{&message, sizeof(message)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof(control);
  const ssize_t size = recvmsg(fd, &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (size > 0) {
    OwnedFd received = descriptor_of(header);
    if (descriptor != nullptr) {
      *descriptor = std::move(received);
    }
  }
  return size;
}

}  // namespace

void MeshMessage::set_text(std::string_view value) {
  const std::size_t length = std::min(value.size(), sizeof(text) - 1);
  std::memcpy(text, value.data(), length);
  text[length] = '\0';
}

SocketMesh::SocketMesh(const GroupInfo& info, const std::string& nonce, const WhyAbsent& why_absent)
    : info_(info), group_(group_hash(info, nonce)), peers_(info.global_ranks.size()) {
  if (peers_.size() > 1) {
    connect_all(nonce, why_absent);
  }
}

std::string SocketMesh::rank_text(int rank) const {
  const int global = info_.global_ranks[static_cast<std::size_t>(rank)];
  return concat_text("rank ", rank, " (global ", global, ")");
}

void SocketMesh::check_absent(const WhyAbsent& why_absent, bool timed_out) const {
  const std::string why = why_absent ? why_absent(timed_out) : "";
  if (why.empty() && !timed_out) {
    return;
  }
  const std::string text = concat_text(
      missing_text(),
      " did not come to the group '",
      info_.name,
      "'",
      timed_out ? concat_text(" within ", info_.timeout_s, " s") : std::string()
  );
  if (!why.empty()) {
    HS_FAIL(CommError, "comm.shm: ", text, ": ", why);
  }
  HS_FAIL(
      CommError,
      "comm.shm: ",
      text,
      HS_HINT("all ranks must run on this host, in one network namespace, with one job nonce")
  );
}

void SocketMesh::connect_all(const std::string& nonce, const WhyAbsent& why_absent) {
  // The hash makes the name exact, the start of the nonce tells people whose socket it is.
  const std::string prefix = "hypershard-" + nonce.substr(0, kNonceText) + "-" + hex(group_) + "-";
  const int size = static_cast<int>(peers_.size());
  if (info_.rank < size - 1) {
    listen_as(prefix + std::to_string(info_.rank));
  }
  const double deadline = now_s() + info_.timeout_s;
  while (true) {
    bool all = true;
    for (int peer = 0; peer < size; ++peer) {
      const bool connected = peers_[static_cast<std::size_t>(peer)].valid();
      if (!connected && peer < info_.rank) {
        try_connect(peer, prefix + std::to_string(peer));
      }
      all = all && (peer == info_.rank || peers_[static_cast<std::size_t>(peer)].valid());
    }
    if (all) {
      break;
    }
    check_absent(why_absent, now_s() > deadline);
    if (listener_.valid()) {
      if (readable(listener_.get(), kSliceMs)) {
        accept_one();
      }
    } else {
      poll(nullptr, 0, kSliceMs);
    }
  }
  listener_.reset();
}

void SocketMesh::listen_as(const std::string& name) {
  listener_ = make_socket(info_.name);
  const Address address = abstract_address(name);
  const auto* generic = reinterpret_cast<const sockaddr*>(&address.storage);
  if (bind(listener_.get(), generic, address.length) != 0 ||
      listen(listener_.get(), static_cast<int>(peers_.size())) != 0) {
    HS_FAIL(
        CommError,
        "comm.shm: ",
        rank_text(info_.rank),
        " cannot listen on the abstract socket '",
        name,
        "' for '",
        info_.name,
        "': ",
        errno_text(errno),
        HS_HINT("another process plays this rank of this job; give each job its own nonce")
    );
  }
}

bool SocketMesh::try_connect(int peer, const std::string& name) {
  OwnedFd fd = make_socket(info_.name);
  const Address address = abstract_address(name);
  const auto* generic = reinterpret_cast<const sockaddr*>(&address.storage);
  if (connect(fd.get(), generic, address.length) != 0) {
    // Not there yet, or its queue is full: both pass. Anything else does not.
    if (errno == ECONNREFUSED || errno == EAGAIN || errno == EINTR) {
      return false;
    }
    HS_FAIL(
        CommError,
        "comm.shm: cannot connect to ",
        rank_text(peer),
        " of '",
        info_.name,
        "': ",
        errno_text(errno)
    );
  }
  check_user(fd.get());
  peers_[static_cast<std::size_t>(peer)] = std::move(fd);
  MeshMessage hello;
  hello.group = group_;
  hello.rank = info_.rank;
  send(peer, hello);
  return true;
}

void SocketMesh::accept_one() {
  OwnedFd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd.valid()) {
    return;  // the peer has gone again; the time-out tells if it stays away
  }
  check_user(fd.get());
  MeshMessage hello;
  if (!readable(fd.get(), kHelloMs) ||
      receive_packet(fd.get(), hello, nullptr) != static_cast<ssize_t>(sizeof(hello))) {
    return;
  }
  const auto size = static_cast<std::int64_t>(peers_.size());
  if (hello.kind != MeshMessage::Kind::kHello || hello.group != group_ ||
      hello.rank <= info_.rank || hello.rank >= size) {
    HS_FAIL(
        CommError,
        "comm.shm: a stranger came to the group '",
        info_.name,
        "': it says it is rank ",
        hello.rank,
        " of ",
        size,
        HS_HINT("do all ranks run the same build?")
    );
  }
  peers_[static_cast<std::size_t>(hello.rank)] = std::move(fd);
}

void SocketMesh::check_user(int fd) const {
  ucred peer{};
  socklen_t length = sizeof(peer);
  const bool known = getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0;
  if (!known || peer.uid != geteuid()) {
    HS_FAIL(
        CommError,
        "comm.shm: process ",
        peer.pid,
        " in the group '",
        info_.name,
        "' runs under another user: uid ",
        peer.uid,
        " (expected ",
        geteuid(),
        ")"
    );
  }
}

std::string SocketMesh::missing_text() const {
  std::string text;
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    if (static_cast<int>(peer) != info_.rank && !peers_[peer].valid()) {
      text += text.empty() ? "" : ", ";
      text += rank_text(static_cast<int>(peer));
    }
  }
  return text;
}

void SocketMesh::send(int peer, const MeshMessage& message, int fd) {
  MeshMessage copy = message;
  iovec part{&copy, sizeof(copy)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (fd >= 0) {
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &fd, sizeof(fd));
  }
  const int socket = peers_[static_cast<std::size_t>(peer)].get();
  while (sendmsg(socket, &header, MSG_NOSIGNAL) < 0) {
    if (errno == EAGAIN) {  // the queue is as long as a rank is behind, a few packets
      pollfd entry{socket, POLLOUT, 0};
      poll(&entry, 1, kSliceMs);
    } else if (errno != EINTR) {
      HS_FAIL(
          CommError,
          "comm.shm: ",
          rank_text(peer),
          " of '",
          info_.name,
          "' died (its connection is closed): ",
          errno_text(errno)
      );
    }
  }
}

MeshMessage SocketMesh::receive(
    int peer, std::string_view what, const std::function<void()>& progress, OwnedFd* fd
) {
  const int socket = peers_[static_cast<std::size_t>(peer)].get();
  const double deadline = now_s() + info_.timeout_s;
  bool gone = false;
  while (true) {
    MeshMessage message;
    const ssize_t size = receive_packet(socket, message, fd);
    if (size == static_cast<ssize_t>(sizeof(message))) {
      return message;
    }
    const bool again = size < 0 && (errno == EAGAIN || errno == EINTR);
    if (size == 0 || gone) {
      HS_FAIL(
          CommError,
          "comm.shm: ",
          rank_text(peer),
          " died (its connection closed) while '",
          info_.name,
          "' allocated memory for ",
          what
      );
    }
    const std::vector<int> lost = lost_peers();
    if (!again || std::find(lost.begin(), lost.end(), peer) != lost.end()) {
      gone = true;  // but its last words may lie in the queue, behind the error
      continue;
    }
    if (now_s() > deadline) {
      HS_FAIL(
          CommError,
          "comm.shm: ",
          rank_text(peer),
          " has not joined the allocation of ",
          what,
          " on '",
          info_.name,
          "' within ",
          info_.timeout_s,
          " s"
      );
    }
    progress();
    readable(socket, kSliceMs);
  }
}

std::vector<int> SocketMesh::lost_peers() const {
  std::vector<pollfd> entries;
  for (const OwnedFd& fd : peers_) {
    entries.push_back({fd.get(), 0, 0});  // negative descriptors are skipped
  }
  std::vector<int> lost;
  if (poll(entries.data(), entries.size(), 0) > 0) {
    for (std::size_t peer = 0; peer < entries.size(); ++peer) {
      if ((entries[peer].revents & (POLLHUP | POLLERR | POLLNVAL)) != 0) {
        lost.push_back(static_cast<int>(peer));
      }
    }
  }
  return lost;
}

}  // namespace hypershard::comm::internal
