// A job whose ranks are threads and talk over Gloo through the loopback interface: the code path
// between supernodes, testable inside one process.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "hypershard/comm/c10d/gloo_communicator.h"
#include "hypershard/comm/world.h"

namespace hypershard::comm {

/// Makes the worlds of a job of threads.
///
/// Life cycle: one object for all threads, which outlives their worlds.
/// Threads: any.
class GlooJob {
 public:
  explicit GlooJob(layout::Topology topology, double timeout_s = 20);

  /// Makes the world of one rank; call it once a rank, on that rank's thread.
  std::shared_ptr<World> world(int rank);

  /// Ends every collective of every rank with this reason, now and from now on.
  void abort(const std::string& why);

 private:
  friend class GlooThreadWorld;
  void add(const std::shared_ptr<Communicator>& communicator);

  layout::Topology topology_;
  double timeout_s_;
  std::shared_ptr<Rendezvous> rendezvous_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<Communicator>> communicators_;
  std::string abort_reason_;
};

}  // namespace hypershard::comm
