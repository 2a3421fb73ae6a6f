// Why: see comm_meter.h.
#include "hypershard/train/comm_meter.h"

#include <algorithm>

#include "hypershard/shard/engine.h"

namespace hypershard::train {

CommMeter::CommMeter(
    const shard::ShardedModel& model,
    const comm::ProcessMesh& mesh,
    const comm::Communicator& everyone
) {
  const shard::DataParallel& parallel = model.engine().parallel();
  for (const auto* axes : {&parallel.cuts, &parallel.summed}) {
    for (const shard::DataAxis& axis : *axes) {
      add(axis.gather.get());
      add(axis.reduce.get());
    }
  }
  for (const auto& item : parallel.plan_reduce) {
    add(item.second.get());
  }
  for (const layout::MeshAxis& axis : mesh.mesh().axes()) {
    add(mesh.axis(axis.name).get());
  }
  add(parallel.control.get());
  add(parallel.plan.get());
  add(&everyone);
}

void CommMeter::add(const comm::Communicator* communicator) {
  if (communicator != nullptr &&
      std::find(communicators_.begin(), communicators_.end(), communicator) ==
          communicators_.end()) {
    communicators_.push_back(communicator);
  }
}

std::int64_t CommMeter::exposed_ns() const {
  return exposed_ns(layout::Tier::kIntra) + exposed_ns(layout::Tier::kInter);
}

std::int64_t CommMeter::exposed_ns(layout::Tier tier) const {
  const comm::CommStats sum = stats(tier);
  return sum.wait_ns + sum.reduce_ns;
}

comm::CommStats CommMeter::stats(layout::Tier tier) const {
  comm::CommStats sum;
  for (const comm::Communicator* communicator : communicators_) {
    if (communicator->info().tier == tier) {
      const comm::CommStats own = communicator->stats();
      sum.wait_ns += own.wait_ns;
      sum.asleep_ns += own.asleep_ns;
      sum.late_ns += own.late_ns;
      sum.reduce_ns += own.reduce_ns;
      sum.staged_bytes += own.staged_bytes;
      sum.busy_ns += own.busy_ns;
      sum.sent_bytes += own.sent_bytes;
      sum.received_bytes += own.received_bytes;
    }
  }
  return sum;
}

}  // namespace hypershard::train
