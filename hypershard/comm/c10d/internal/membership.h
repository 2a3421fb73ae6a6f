// How a rank enters a job: through the store that rank 0 or the launcher serves, where every rank
// says who and where it is.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "hypershard/comm/c10d/health.h"
#include "hypershard/comm/c10d/launch_env.h"
#include "hypershard/comm/world.h"

namespace c10d {
class Store;
}

namespace hypershard::comm::internal {

/// Where a rank lives, as it tells the others.
struct Identity {
  std::string host;       ///< equal: the same kernel and network
  std::string supernode;  ///< as stated by the user, or empty
  std::string host_name;
  std::string backend;  ///< that it was told to take: auto, shm, c10d

  std::string label() const { return supernode.empty() ? "host " + host : "stated " + supernode; }
};

/// A rank's connections to the job's store, and what the ranks told each other through it.
struct Membership {
  LaunchInfo info;
  double timeout_s = 0;
  Backend backend = Backend::kAuto;
  bool hosts_store = false;
  c10::intrusive_ptr<::c10d::Store>
      server;  ///< the host's; gone at shutdown, while communicators keep `store`
  c10::intrusive_ptr<::c10d::Store> store;
  std::shared_ptr<Health> health;
  std::vector<Identity> identities;
  std::string nonce;
};

/// Joins the job that `info` describes and returns once all ranks have.
///
/// Errors: CommError that names the store, or the ranks that did not come in time; InvalidArgument
/// if the store is another job's, the rank is taken, or ranks were told different back ends.
Membership join_job(const LaunchInfo& info, const WorldOptions& options);

}  // namespace hypershard::comm::internal
