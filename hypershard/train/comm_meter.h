// Why: the share of a step that communication costs is measured where a rank stands still, not
// modelled.
#pragma once

#include <cstdint>
#include <vector>

#include "hypershard/comm/communicator.h"
#include "hypershard/comm/world.h"
#include "hypershard/shard/fully_shard.h"

namespace hypershard::train {

/// Sums, over all communicators that a sharded model and its trainer use, the time in which this
/// rank's thread did nothing but communicate: stood waiting, or added and copied for a collective.
///
/// Waits for the write window of shared parameters are among it: communicators count those too.
/// Holds plain pointers: the communicators may not go before it.
class CommMeter {
 public:
  /// `mesh`: its axes carry what a plan's boundaries exchange.
  CommMeter(
      const shard::ShardedModel& model,
      const comm::ProcessMesh& mesh,
      const comm::Communicator& everyone
  );

  /// Returns nanoseconds since birth of the communicators.
  std::int64_t exposed_ns() const;
  /// The same of communicators on one tier.
  std::int64_t exposed_ns(layout::Tier tier) const;
  /// Returns what communicators on one tier have counted and timed, all together; times during
  /// which several of them were busy count more than once.
  comm::CommStats stats(layout::Tier tier) const;

 private:
  void add(const comm::Communicator* communicator);

  std::vector<const comm::Communicator*> communicators_;
};

}  // namespace hypershard::train
