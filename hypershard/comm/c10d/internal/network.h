// The few things about hosts and sockets that joining a job needs: who shares this host, where rank
// 0 is, which of this host's addresses reaches it.
#pragma once

#include <string>

namespace hypershard::comm::internal {

/// Tells whether `host` is a name or address of the loopback interface.
bool is_loopback(const std::string& host);

/// Opens a listening socket on `port`, on the loopback interface only if `host` is on it.
/// Errors: CommError if the port is taken, naming it and what to do.
int listen_on(const std::string& host, int port);

/// Waits until something accepts connections at `host`:`port`.
/// Errors: CommError with the last reason after `timeout_s`.
void wait_until_reachable(const std::string& host, int port, double timeout_s);

/// Returns the address of this host from which packets to `host` leave.
/// Errors: CommError if `host` is unknown or unreachable.
std::string local_address_towards(const std::string& host, int port);

/// Returns 32 random hexadecimal digits.
std::string random_nonce();

}  // namespace hypershard::comm::internal
