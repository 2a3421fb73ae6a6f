// Plain sockets; every failure becomes one message that says what was tried.
#include "hypershard/comm/c10d/internal/network.h"

#include <algorithm>
#include <arpa/inet.h>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>
#include <utility>

#include "hypershard/core/clock.h"
#include "hypershard/core/error.h"

namespace hypershard::comm::internal {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

class Socket {
 public:
  Socket(int family, int type) : fd_(::socket(family, type | SOCK_CLOEXEC, 0)) {}
  ~Socket() {
    if (fd_ >= 0) {
      ::close(fd_);
    }
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int fd() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

// Returns null and fills `why` if the name is unknown.
AddressList resolve(const std::string& host, int port, int type, std::string& why) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = type;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) {
    why = std::string("the name is not known: ") + ::gai_strerror(error);
    found = nullptr;
  }
  return AddressList(found, &::freeaddrinfo);
}

bool is_loopback_address(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    sockaddr_in in = {};
    std::memcpy(&in, address, sizeof(in));
    return (ntohl(in.sin_addr.s_addr) >> 24) == 127;
  }
  sockaddr_in6 in = {};
  std::memcpy(&in, address, sizeof(in));
  return address->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&in.sin6_addr);
}

// Tries one address; fills `why` on failure.
bool can_connect(const addrinfo& address, double timeout_s, std::string& why) {
  const Socket socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK);
  int error = 0;
  if (::connect(socket.fd(), address.ai_addr, address.ai_addrlen) != 0) {
    error = errno;
    pollfd waiting = {socket.fd(), POLLOUT, 0};
    if (error == EINPROGRESS) {
      error = ETIMEDOUT;
      if (::poll(&waiting, 1, static_cast<int>(timeout_s * 1e3)) > 0) {
        socklen_t size = sizeof(error);
        ::getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
      }
    }
  }
  why = error == 0 ? std::string() : errno_text(error);
  return error == 0;
}

int try_listen(int family, const sockaddr* address, socklen_t size) {
  Socket socket(family, SOCK_STREAM);
  const int on = 1;
  const int off = 0;
  if (socket.fd() < 0) {
    return -1;
  }
  ::setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (family == AF_INET6) {
    ::setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  }
  if (::bind(socket.fd(), address, size) != 0 || ::listen(socket.fd(), SOMAXCONN) != 0) {
    return -1;
  }
  return socket.release();
}

}  // namespace

bool is_loopback(const std::string& host) {
  std::string why;
  const AddressList addresses = resolve(host, 1, SOCK_STREAM, why);
  return addresses != nullptr && is_loopback_address(addresses->ai_addr);
}

int listen_on(const std::string& host, int port) {
  int fd = -1;
  if (is_loopback(host)) {
    std::string why;
    const AddressList addresses = resolve(host, port, SOCK_STREAM, why);
    fd = try_listen(addresses->ai_family, addresses->ai_addr, addresses->ai_addrlen);
  } else {
    sockaddr_in6 any6 = {};
    any6.sin6_family = AF_INET6;
    any6.sin6_addr = in6addr_any;
    any6.sin6_port = htons(static_cast<std::uint16_t>(port));
    fd = try_listen(AF_INET6, reinterpret_cast<const sockaddr*>(&any6), sizeof(any6));
    if (fd < 0 && errno != EADDRINUSE) {  // a host without IPv6
      sockaddr_in any4 = {};
      any4.sin_family = AF_INET;
      any4.sin_port = any6.sin6_port;
      fd = try_listen(AF_INET, reinterpret_cast<const sockaddr*>(&any4), sizeof(any4));
    }
  }
  if (fd < 0) {
    const int error = errno;
    HS_FAIL(
        CommError,
        "comm.world: rank 0 cannot open the job's store on ",
        host,
        ":",
        port,
        ": ",
        errno_text(error),
        HS_HINT(
            error == EADDRINUSE
                ? "another job or program uses the port: set MASTER_PORT to a free one"
                : "MASTER_ADDR must be an address of rank 0's host"
        )
    );
  }
  return fd;
}

void wait_until_reachable(const std::string& host, int port, double timeout_s) {
  const double deadline_s = now_s() + timeout_s;
  double pause_s = 0.01;
  std::string why;
  while (true) {
    const AddressList addresses = resolve(host, port, SOCK_STREAM, why);
    for (const addrinfo* address = addresses.get(); address != nullptr;
         address = address->ai_next) {
      const double left_s = std::max(0.0, deadline_s - now_s());
      if (can_connect(*address, std::min(left_s, 5.0), why)) {
        return;
      }
    }
    if (now_s() + pause_s >= deadline_s) {
      break;
    }
    std::this_thread::sleep_for(std::chrono::duration<double>(pause_s));
    pause_s = std::min(1.5 * pause_s, 0.5);
  }
  HS_FAIL(
      CommError,
      "comm.world: nobody serves the job's store at ",
      host,
      ":",
      port,
      " after ",
      timeout_s,
      " s: ",
      why,
      HS_HINT("did rank 0 start, and have all ranks the same MASTER_ADDR and MASTER_PORT?")
  );
}

std::string local_address_towards(const std::string& host, int port) {
  std::string why;
  const AddressList addresses = resolve(host, port, SOCK_DGRAM, why);
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    // Connecting a datagram socket sends nothing: it only asks for the route.
    const Socket socket(address->ai_family, SOCK_DGRAM);
    sockaddr_storage own = {};
    socklen_t size = sizeof(own);
    std::array<char, NI_MAXHOST> text = {};
    auto* const own_address = reinterpret_cast<sockaddr*>(&own);
    if (::connect(socket.fd(), address->ai_addr, address->ai_addrlen) != 0 ||
        ::getsockname(socket.fd(), own_address, &size) != 0) {
      why = errno_text(errno);
      continue;
    }
    if (::getnameinfo(own_address, size, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) ==
        0) {
      return text.data();
    }
  }
  HS_FAIL(
      CommError,
      "comm.world: no address of this host reaches ",
      host,
      ": ",
      why,
      HS_HINT("GLOO_SOCKET_IFNAME names the network interface to use")
  );
}

std::string random_nonce() {
  std::array<unsigned char, 16> bytes = {};
  const auto got = ::getrandom(bytes.data(), bytes.size(), 0);
  HS_ASSERT(
      got == static_cast<ssize_t>(bytes.size()), "comm.world: getrandom gave ", got, " bytes"
  );
  std::string text;
  for (const unsigned char byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

}  // namespace hypershard::comm::internal
