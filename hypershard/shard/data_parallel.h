// The data axes of a mesh as the engine uses them: in what order buffers are cut, and who talks to
// whom. Derived once from the three layouts; every group of a model shares it.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "hypershard/comm/world.h"
#include "hypershard/layout/packing.h"
#include "hypershard/layout/strategy.h"

namespace hypershard::shard {

/// One data axis. Gathers and reductions have communicators of their own, so that the order in
/// which stages of the one start never depends on the timing of the other.
struct DataAxis {
  std::string name;
  int size = 1;
  int coordinate = 0;
  std::shared_ptr<comm::Communicator> gather;
  std::shared_ptr<comm::Communicator> reduce;
};

/// How the planes of a group are cut.
///
/// NOTE [nested cuts]: a buffer is cut along `cuts[0]`, each piece along `cuts[1]`, and so on. The
/// runtime plane uses the first `runtime_levels` cuts, the gradient plane the first
/// `gradient_levels`, the update plane all of them: each plane's share of a rank lies inside the
/// one before it.
struct DataParallel {
  layout::PlaneLayouts layouts;
  std::string replicate_axis;  ///< the data axis between supernodes; "" if there is none
  std::vector<DataAxis> cuts;
  int runtime_levels = 0;
  int gradient_levels = 0;
  int update_levels = 0;
  std::vector<DataAxis>
      summed;  ///< axes whose gradient stays whole: all-reduced after the reduce-scatters
  std::shared_ptr<comm::Communicator> control;  ///< over all data axes: norms, checks, epochs
  int data_size = 1;                            ///< ranks that see different data
  /// Over all plan axes (NOTE [plan axes] in shard/parameter_part.h); null if there are none.
  std::shared_ptr<comm::Communicator> plan;
  /// For sums of gradients that are Partial on plan axes, by the axes' names.
  std::map<std::vector<std::string>, std::shared_ptr<comm::Communicator>> plan_reduce;

  std::vector<int> cut_sizes() const;
  /// Returns this rank's coordinates on the first `levels` cuts.
  std::vector<int> coordinates(int levels) const;
};

/// Derives cut order and communicators. Collective: all ranks of the mesh.
/// Errors: InvalidArgument if the layouts are not nested (runtime in gradient in update), naming
/// the axis.
DataParallel make_data_parallel(
    const comm::ProcessMesh& mesh, const layout::PlaneLayouts& layouts, const layout::DataAxes& axes
);

}  // namespace hypershard::shard
