// Why: ranks that are threads of one process: the cheapest way to run a distributed program, for
// tests and examples. Same algorithm as between processes.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "hypershard/comm/world.h"
#include "hypershard/layout/topology.h"

namespace hypershard::comm {

/// How the ranks of a LocalJob talk. Equal on all ranks.
struct LocalOptions {
  double timeout_s = 300;  ///< of a collective
  /// Peers read tensors where they lie. False: only what is in shared buffers and arenas, all else
  /// is staged as between processes (tests of that path).
  bool reads_any_memory = true;
  std::int64_t staging_bytes = std::int64_t{1} << 20;  ///< a rank
  std::int64_t step_bytes = std::int64_t{64} << 10;    ///< staged at once
};

/// A job whose ranks are threads of this process.
///
/// Life cycle: made once; each rank's thread takes its world; the job may go before its worlds.
/// Threads: all methods may be called from any thread.
class LocalJob {
 public:
  explicit LocalJob(layout::Topology topology, const LocalOptions& options = {});
  ~LocalJob();
  LocalJob(const LocalJob&) = delete;
  LocalJob& operator=(const LocalJob&) = delete;

  /// Returns the view of `rank`, which belongs to the thread that plays that rank.
  /// Errors: InvalidArgument if out of range or taken before.
  std::shared_ptr<World> world(int rank) const;

  /// Makes every collective of the job fail with `why`, now and later.
  void abort(std::string_view why);

 private:
  struct Hub;
  class LocalWorld;
  class Source;
  std::shared_ptr<Hub> hub_;
};

}  // namespace hypershard::comm
