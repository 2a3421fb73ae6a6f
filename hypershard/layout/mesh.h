// Names the axes of a job and says which ranks vary along each of them.
// A mesh is integers only: a mesh of 100,000 ranks costs nothing to build.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hypershard/layout/topology.h"

namespace hypershard::layout {

/// Says over which kind of link a group of ranks talks.
enum class Tier {
  kIntra,  ///< every group lies inside one supernode
  kInter,  ///< some group crosses supernodes
};
std::string to_text(Tier tier);

/// One named axis of a mesh.
struct MeshAxis {
  std::string name;
  int size = 1;
};

/// A named grid over ranks 0 … size-1, row-major: the last axis varies fastest.
///
/// Immutable. Threads: const methods may be called from any thread.
class DeviceMesh {
 public:
  /// Takes the axes from slowest to fastest; no axes at all make a mesh of one rank.
  /// Errors: InvalidArgument if an axis has no name, a repeated name or a size < 1, or if the
  /// sizes' product is not the topology's world size.
  DeviceMesh(std::vector<MeshAxis> axes, Topology topology);

  int size() const { return topology_.world_size(); }
  int num_axes() const { return static_cast<int>(axes_.size()); }
  const std::vector<MeshAxis>& axes() const { return axes_; }
  const Topology& topology() const { return topology_; }
  bool has_axis(std::string_view name) const;

  /// Returns the index of the axis.
  /// Errors: InvalidArgument naming the axes there are and the nearest one.
  int axis_index(std::string_view name) const;
  int axis_size(std::string_view name) const;

  /// Returns the coordinate of `rank` along an axis.
  /// Errors: InvalidArgument for an unknown axis or a rank out of range.
  int coordinate(int rank, std::string_view axis) const;

  /// Returns the coordinates of `rank`, one an axis. Errors: InvalidArgument if out of range.
  std::vector<int> coordinates(int rank) const;

  /// Returns the ranks that share all coordinates of `rank` but those on `group_axes`; the first
  /// axis named is the slowest. An empty list gives {rank}. All members get the same list.
  /// Errors: InvalidArgument for an unknown or repeated axis, or a rank out of range.
  std::vector<int> group(std::span<const std::string> group_axes, int rank) const;

  /// Returns kIntra if every group along `group_axes` lies inside one supernode.
  /// Errors: InvalidArgument for an unknown or repeated axis.
  Tier tier(std::span<const std::string> group_axes) const;

 private:
  std::vector<MeshAxis> axes_;
  std::vector<int> strides_;
  Topology topology_;
};
std::string to_text(const DeviceMesh& mesh);

}  // namespace hypershard::layout
