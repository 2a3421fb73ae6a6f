// Worlds that differ from a process's only in their store, which is a map in memory, and in having
// no heartbeat: a thread does not die alone.
#include "hypershard/comm/c10d/gloo_job.h"

#include <utility>

#include "hypershard/comm/c10d/internal/message_communicator.h"
#include "hypershard/core/error.h"

namespace hypershard::comm {

class GlooThreadWorld : public World {
 public:
  GlooThreadWorld(int rank, layout::Topology topology, double timeout_s, GlooJob* job)
      : World(rank, std::move(topology), timeout_s), job_(job) {}

  std::string description() const override {
    return concat_text("rank ", rank(), " of ", size(), ", a thread over Gloo");
  }

  // Ends with the threads: whoever destroys its communicators has finished its last collective.
  void shutdown() override {}

 protected:
  std::shared_ptr<Communicator> make_communicator(GroupInfo info) override {
    std::string prefix = info.name + "/";
    for (const int rank : info.global_ranks) {
      prefix += std::to_string(rank) + ",";
    }
    auto communicator = make_gloo_communicator(std::move(info), job_->rendezvous_->store(), prefix);
    job_->add(communicator);
    return communicator;
  }

 private:
  GlooJob* job_;
};

GlooJob::GlooJob(layout::Topology topology, double timeout_s)
    : topology_(std::move(topology)),
      timeout_s_(timeout_s),
      rendezvous_(Rendezvous::in_process()) {}

std::shared_ptr<World> GlooJob::world(int rank) {
  return std::make_shared<GlooThreadWorld>(rank, topology_, timeout_s_, this);
}

void GlooJob::add(const std::shared_ptr<Communicator>& communicator) {
  const std::lock_guard lock(mutex_);
  communicators_.push_back(communicator);
  if (!abort_reason_.empty()) {
    dynamic_cast<internal::MessageCommunicator&>(*communicator).abort(abort_reason_);
  }
}

void GlooJob::abort(const std::string& why) {
  const std::lock_guard lock(mutex_);
  abort_reason_ = why.empty() ? "the job was aborted" : why;
  for (const std::weak_ptr<Communicator>& weak : communicators_) {
    if (const auto communicator = weak.lock()) {
      dynamic_cast<internal::MessageCommunicator&>(*communicator).abort(abort_reason_);
    }
  }
}

}  // namespace hypershard::comm
