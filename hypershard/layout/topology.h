// Which ranks are close to each other: the map from ranks to supernodes.
// Everything that chooses between shared memory and a network link asks this class.
#pragma once

#include <string>
#include <vector>

namespace hypershard::layout {

/// Maps each rank of a job to its supernode (a set of ranks joined by fast links).
///
/// Immutable after construction; supernode ids are dense, in order of their lowest rank.
/// Threads: const methods may be called from any thread.
class Topology {
 public:
  /// Puts all ranks in one supernode. Errors: InvalidArgument if `world_size` < 1.
  static Topology single_supernode(int world_size);

  /// Builds from one label a rank; equal labels mean the same supernode.
  /// Errors: InvalidArgument if `labels` is empty.
  static Topology from_labels(const std::vector<std::string>& labels);

  int world_size() const { return static_cast<int>(supernode_of_.size()); }
  int num_supernodes() const { return static_cast<int>(ranks_of_.size()); }

  /// Returns the supernode of `rank`. Errors: InvalidArgument if out of range.
  int supernode_of(int rank) const;

  /// Returns the ranks of one supernode, ascending. Errors: InvalidArgument if out of range.
  const std::vector<int>& ranks_of(int supernode) const;

  /// Tells whether all of `ranks` lie in one supernode (true for an empty list).
  /// Errors: InvalidArgument if a rank is out of range.
  bool all_in_one_supernode(const std::vector<int>& ranks) const;

 private:
  explicit Topology(std::vector<int> supernode_of);

  std::vector<int> supernode_of_;
  std::vector<std::vector<int>> ranks_of_;
};

}  // namespace hypershard::layout
