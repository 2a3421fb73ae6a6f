// The job as one rank sees it: who am I, who else is there, how do we reach each other.
// Built from the launcher's environment for processes, by run_ranks for threads, by hand for tests
// and planning.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hypershard/comm/communicator.h"
#include "hypershard/layout/mesh.h"
#include "hypershard/layout/topology.h"

namespace hypershard::comm {

/// Which back end joins ranks of one supernode.
enum class Backend { kAuto, kShm, kC10d };

/// How a process joins its job.
struct WorldOptions {
  Backend backend =
      Backend::kAuto;    ///< kAuto: shm inside a supernode, c10d between; kC10d: c10d everywhere
  double timeout_s = 0;  ///< 0: HS_TIMEOUT_S
};

/// One rank's view of the job.
///
/// Owned by shared_ptr; communicators keep what they need alive. Destruction order: communicators
/// first, then the world; `shutdown()` is a collective that ends the job cleanly (without it, peers
/// see this rank's exit as a death). Threads: one calling thread.
class World : public std::enable_shared_from_this<World> {
 public:
  /// Joins the job described by the launcher's environment (torchrun, srun, mpirun, `hypershard
  /// --ranks`); without any, a job of one rank. Collective: all ranks of the job. Errors:
  /// InvalidArgument for a contradictory or malformed environment (names the variables); CommError
  /// if the peers do not appear in time.
  static std::shared_ptr<World> join(const WorldOptions& options = {});

  virtual ~World() = default;
  int rank() const { return rank_; }
  int size() const { return topology_.world_size(); }
  const layout::Topology& topology() const { return topology_; }
  double timeout_s() const { return timeout_s_; }
  virtual std::string description() const = 0;  ///< one line for logs and `info`

  /// Makes (or returns the existing) communicator over `global_ranks`; this rank must be among
  /// them. Collective: the ranks named, in one order over all communicators they share.
  std::shared_ptr<Communicator> communicator(
      const std::string& name, const std::vector<int>& global_ranks
  );
  /// Returns the communicator over all ranks.
  std::shared_ptr<Communicator> world_communicator();

  /// Describes the newest collective of each communicator, for reports on a rank that failed or
  /// hangs.
  std::string last_collectives() const;

  /// Ends the job's use of the network and shared memory after a barrier. Collective: all ranks.
  virtual void shutdown() = 0;

 protected:
  World(int rank, layout::Topology topology, double timeout_s);
  virtual std::shared_ptr<Communicator> make_communicator(GroupInfo info) = 0;

 private:
  int rank_;
  layout::Topology topology_;
  double timeout_s_;
  std::vector<std::pair<std::string, std::shared_ptr<Communicator>>> communicators_;
};

/// A world with a mesh over it: communicators by axis name.
class ProcessMesh {
 public:
  /// Collective: all ranks of the world. Errors: InvalidArgument if the mesh's size is not the
  /// world's.
  ProcessMesh(std::shared_ptr<World> world, layout::DeviceMesh mesh);

  World& world() const { return *world_; }
  const layout::DeviceMesh& mesh() const { return mesh_; }
  int rank() const { return world_->rank(); }

  /// Returns the communicator along one axis. Errors: InvalidArgument for an unknown axis.
  std::shared_ptr<Communicator> axis(std::string_view name) const;
  /// Returns the communicator over several axes, the first the slowest; {} gives the rank alone.
  /// Collective on first use.
  std::shared_ptr<Communicator> axes(std::span<const std::string> names) const;

 private:
  std::shared_ptr<World> world_;
  layout::DeviceMesh mesh_;
};

}  // namespace hypershard::comm
