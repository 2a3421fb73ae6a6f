// Why: see local_world.h. The hub is where the threads find the memory of their groups: whoever
// comes first makes it.
#include "hypershard/comm/local/local_world.h"

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "hypershard/comm/shm/internal/memfd.h"
#include "hypershard/comm/shm/internal/shared_memory_communicator.h"
#include "hypershard/core/error.h"

namespace hypershard::comm {
namespace {

/// The memory of one group, held by the communicators of its ranks.
struct Group {
  struct Allocation {
    std::int64_t bytes = 0;
    std::string what;
    int taken = 0;  ///< ranks that have it; the group lets go of it with the last
    std::shared_ptr<SharedBuffer> buffer;
  };

  int size = 0;
  std::mutex mutex;
  std::vector<Allocation> allocations;
  std::shared_ptr<SharedBuffer> control;  ///< the first allocation, kept for abort()
  std::vector<at::Tensor> kept;           ///< what peers of ranks that left may still be reading
};

}  // namespace

/// What the threads of a job share.
struct LocalJob::Hub {
  Hub(layout::Topology a_topology, const LocalOptions& a_options)
      : topology(std::move(a_topology)),
        options(a_options),
        taken(static_cast<std::size_t>(topology.world_size()), false) {}

  std::shared_ptr<Group> join(const std::string& key, int size);
  void abort(std::string_view why);

  const layout::Topology topology;
  const LocalOptions options;
  std::mutex mutex;
  std::string aborted;
  std::vector<bool> taken;  ///< by rank: its world has been handed out
  struct Entry {
    std::shared_ptr<Group> group;  ///< until all ranks have joined
    std::weak_ptr<Group> joined;
    int num_joined = 0;
  };
  std::map<std::string, Entry> groups;
};

std::shared_ptr<Group> LocalJob::Hub::join(const std::string& key, int size) {
  const std::lock_guard lock(mutex);
  if (!aborted.empty()) {
    HS_FAIL(CommError, "comm.local: ", aborted);
  }
  Entry& entry = groups[key];
  if (entry.num_joined == 0) {
    entry.group = std::make_shared<Group>();
    entry.group->size = size;
    entry.joined = entry.group;
  }
  auto group = entry.group;
  if (++entry.num_joined == size) {
    entry.group.reset();
  }
  return group;
}

void LocalJob::Hub::abort(std::string_view why) {
  const std::lock_guard lock(mutex);
  aborted = why.empty() ? "the job was aborted" : std::string(why);
  for (const auto& [key, entry] : groups) {
    const std::shared_ptr<Group> group = entry.joined.lock();
    if (group == nullptr) {
      continue;
    }
    const std::lock_guard group_lock(group->mutex);
    if (group->control != nullptr) {
      internal::record_failure(
          internal::ControlBlock(group->control->write(), group->size), -1, aborted
      );
    }
  }
}

/// One rank's end of a group: allocations are matched by their order.
class LocalJob::Source : public internal::RegionSource {
 public:
  Source(std::shared_ptr<Hub> hub, std::shared_ptr<Group> group, std::string group_name)
      : hub_(std::move(hub)), group_(std::move(group)), group_name_(std::move(group_name)) {}

  std::string name() const override { return "local"; }
  std::shared_ptr<SharedBuffer> allocate(
      std::int64_t bytes,
      std::string_view what,
      internal::RegionUse use,
      const std::function<void()>& progress
  ) override;
  bool reads_any_memory() const override { return hub_->options.reads_any_memory; }
  std::vector<int> lost_peers() override { return {}; }
  void keep(std::vector<at::Tensor> tensors) override;

 private:
  std::shared_ptr<Hub> hub_;
  std::shared_ptr<Group> group_;
  std::string group_name_;
  std::size_t num_allocations_ = 0;
};

std::shared_ptr<SharedBuffer> LocalJob::Source::
    allocate(std::int64_t bytes, std::string_view what, internal::RegionUse use, const std::function<void()>&) {
  const std::size_t index = num_allocations_++;
  const std::lock_guard lock(group_->mutex);
  if (index == group_->allocations.size()) {
    const internal::OwnedFd fd = internal::create_memory(bytes, what, use);
    auto buffer = internal::map_memory(fd.get(), bytes, what, use);
    if (index == 0) {
      group_->control = buffer;
    }
    group_->allocations.push_back({bytes, std::string(what), 0, std::move(buffer)});
  }
  Group::Allocation& allocation = group_->allocations[index];
  if (allocation.bytes != bytes || allocation.what != what) {
    const std::string text = concat_text(
        "the ranks of '",
        group_name_,
        "' allocate different memory: ",
        allocation.bytes,
        " bytes for ",
        allocation.what,
        " on one, ",
        bytes,
        " bytes for ",
        what,
        " on another; all ranks must allocate the same in the same order"
    );
    internal::record_failure(
        internal::ControlBlock(group_->control->write(), group_->size), -1, text
    );
    HS_FAIL(CommError, "comm.local: ", text);
  }
  auto buffer = allocation.buffer;
  if (++allocation.taken == group_->size) {
    allocation.buffer.reset();
  }
  return buffer;
}

void LocalJob::Source::keep(std::vector<at::Tensor> tensors) {
  const std::lock_guard lock(group_->mutex);
  for (at::Tensor& tensor : tensors) {
    group_->kept.push_back(std::move(tensor));
  }
}

/// A rank that is a thread.
class LocalJob::LocalWorld : public World {
 public:
  LocalWorld(std::shared_ptr<Hub> hub, int rank)
      : World(rank, hub->topology, hub->options.timeout_s), hub_(std::move(hub)) {}

  std::string description() const override {
    return concat_text("local: rank ", rank(), " of ", size(), ", threads of one process");
  }
  void shutdown() override { world_communicator()->barrier("shutdown")->wait(); }

 protected:
  std::shared_ptr<Communicator> make_communicator(GroupInfo info) override;

 private:
  std::shared_ptr<Hub> hub_;
};

std::shared_ptr<Communicator> LocalJob::LocalWorld::make_communicator(GroupInfo info) {
  std::string key = info.name;
  for (const int rank : info.global_ranks) {
    key += " " + std::to_string(rank);
  }
  const int size = static_cast<int>(info.global_ranks.size());
  auto source = std::make_shared<Source>(hub_, hub_->join(key, size), info.name);
  internal::SharedOptions options;
  options.staging_bytes = hub_->options.staging_bytes;
  options.step_bytes = hub_->options.step_bytes;
  return std::make_shared<internal::SharedMemoryCommunicator>(
      std::move(info), std::move(source), options
  );
}

LocalJob::LocalJob(layout::Topology topology, const LocalOptions& options)
    : hub_(std::make_shared<Hub>(std::move(topology), options)) {}

LocalJob::~LocalJob() = default;

std::shared_ptr<World> LocalJob::world(int rank) const {
  auto world = std::make_shared<LocalWorld>(hub_, rank);
  const std::lock_guard lock(hub_->mutex);
  HS_CHECK(
      !hub_->taken[static_cast<std::size_t>(rank)],
      "comm.local: the world of rank ",
      rank,
      " was taken before",
      HS_HINT("make a new LocalJob to start over")
  );
  hub_->taken[static_cast<std::size_t>(rank)] = true;
  return world;
}

void LocalJob::abort(std::string_view why) {
  hub_->abort(why);
}

}  // namespace hypershard::comm
