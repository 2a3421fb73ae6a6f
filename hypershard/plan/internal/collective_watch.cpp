// See collective_watch.h.
#include "hypershard/plan/internal/collective_watch.h"

#include "hypershard/core/text.h"

namespace hypershard::plan::internal {

CollectiveWatch::CollectiveWatch(const comm::ProcessMesh& mesh, const ResolvedPlan& plan) {
  for (const auto& axis : mesh.mesh().axes()) {
    if (!plan.is_data_axis(axis.name)) {
      axes_.emplace_back(mesh.axis(axis.name), 0);
    }
  }
  for (const ResolvedBoundary& boundary : plan.boundaries) {
    units_.insert(to_text(boundary.site));
  }
  for (const ResolvedParameter& parameter : plan.parameters) {
    units_.insert(parameter.name);
  }
  settle();
}

void CollectiveWatch::settle() {
  for (auto& [ranks, seen] : axes_) {
    seen = ranks->log().size();
  }
}

std::vector<std::string> CollectiveWatch::order() const {
  std::vector<std::string> order;
  for (const auto& [ranks, seen] : axes_) {
    if (ranks->log().size() == seen) {
      continue;
    }
    for (const comm::LogEntry& entry : ranks->log().entries()) {
      if (entry.sequence >= seen) {
        order.push_back(concat_text(
            comm::to_text(entry.op),
            " of ",
            entry.dtype,
            " for '",
            entry.unit,
            "' on axis '",
            entry.communicator,
            "'"
        ));
      }
    }
  }
  return order;
}

std::string CollectiveWatch::unannounced() const {
  for (const auto& [ranks, seen] : axes_) {
    if (ranks->log().size() == seen) {
      continue;
    }
    for (const comm::LogEntry& entry : ranks->log().entries()) {
      if (entry.sequence >= seen && !units_.contains(entry.unit)) {
        return to_text(entry);
      }
    }
  }
  return "";
}

}  // namespace hypershard::plan::internal
