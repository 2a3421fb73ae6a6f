// Notices collectives on the plan's axes that nobody announced.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "hypershard/comm/world.h"
#include "hypershard/plan/resolved_plan.h"

namespace hypershard::plan::internal {

/// Watches the log of each axis communicator that is no data axis. Collectives of the plan are
/// known by their unit: a boundary's site or a parameter's name.
class CollectiveWatch {
 public:
  CollectiveWatch(const comm::ProcessMesh& mesh, const ResolvedPlan& plan);
  /// Takes everything until now as announced.
  void settle();
  /// Returns the text of the first collective since that is not the plan's, empty if there is none.
  std::string unannounced() const;
  /// Lists the collectives since, axis by axis in their order, as all ranks must have run them:
  /// without sizes, which may be uneven. Of very many the log keeps the newest.
  std::vector<std::string> order() const;

 private:
  std::set<std::string> units_;
  std::vector<std::pair<std::shared_ptr<comm::Communicator>, std::uint64_t>> axes_;
};

}  // namespace hypershard::plan::internal
