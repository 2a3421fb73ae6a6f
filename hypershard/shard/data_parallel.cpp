// See data_parallel.h.
#include "hypershard/shard/data_parallel.h"

#include <algorithm>
#include <utility>

#include "hypershard/core/error.h"
#include "hypershard/shard/parameter_part.h"

namespace hypershard::shard {

namespace {

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Appends to `order` the axes of `wanted` it lacks; what it has must be wanted too, or the planes
// would not be nested.
void extend(
    std::vector<std::string>& order,
    const std::vector<std::string>& wanted,
    const char* inner,
    const char* outer
) {
  for (const std::string& name : order) {
    HS_CHECK(
        contains(wanted, name),
        "shard: the ",
        inner,
        " layout splits axis '",
        name,
        "' but the ",
        outer,
        " layout does not; the ",
        outer,
        " layout must split every axis that the ",
        inner,
        " layout splits",
        HS_HINT(
            "split '",
            name,
            "' in the ",
            outer,
            " layout too, or replicate it in the ",
            inner,
            " layout"
        )
    );
  }
  for (const std::string& name : wanted) {
    if (!contains(order, name)) {
      order.push_back(name);
    }
  }
}

// Other ways to lie on a data axis would be taken for Flat.
void check_only_flat(
    const layout::PlaneLayouts& layouts,
    const layout::DeviceMesh& mesh,
    const layout::DataAxes& axes
) {
  for (const layout::Layout* layout : {&layouts.runtime, &layouts.gradient, &layouts.update}) {
    for (std::size_t i = 0; i < mesh.axes().size(); ++i) {
      const std::string& name = mesh.axes()[i].name;
      const layout::Placement& placement = layout->placements[i];
      HS_SUPPORTED(
          (name != axes.replicate && name != axes.shard) || !placement.splits() ||
              placement == layout::Placement::flat(),
          "shard: the data axis '",
          name,
          "' has the placement ",
          placement,
          "; data axes take Replicate or Flat",
          HS_HINT("cut dimensions of tensors on an axis of a plan")
      );
    }
  }
}

DataAxis make_axis(const comm::ProcessMesh& mesh, const std::string& name) {
  DataAxis axis;
  axis.name = name;
  axis.size = mesh.mesh().axis_size(name);
  axis.coordinate = mesh.mesh().coordinate(mesh.rank(), name);
  const std::vector<std::string> names{name};
  const std::vector<int> ranks = mesh.mesh().group(names, mesh.rank());
  axis.gather = mesh.world().communicator(name, ranks);
  axis.reduce = mesh.world().communicator(name + ":reduce", ranks);
  return axis;
}

}  // namespace

std::vector<int> DataParallel::cut_sizes() const {
  std::vector<int> sizes;
  for (const DataAxis& axis : cuts) {
    sizes.push_back(axis.size);
  }
  return sizes;
}

std::vector<int> DataParallel::coordinates(int levels) const {
  std::vector<int> result;
  for (int level = 0; level < levels; ++level) {
    result.push_back(cuts[static_cast<std::size_t>(level)].coordinate);
  }
  return result;
}

DataParallel make_data_parallel(
    const comm::ProcessMesh& mesh, const layout::PlaneLayouts& layouts, const layout::DataAxes& axes
) {
  layout::check_plane_layouts(layouts, mesh.mesh(), axes);
  check_only_flat(layouts, mesh.mesh(), axes);
  DataParallel result;
  result.layouts = layouts;
  result.replicate_axis = axes.replicate;

  std::vector<std::string> order = layout::split_axes(layouts.runtime, mesh.mesh(), axes);
  result.runtime_levels = static_cast<int>(order.size());
  extend(order, layout::split_axes(layouts.gradient, mesh.mesh(), axes), "runtime", "gradient");
  result.gradient_levels = static_cast<int>(order.size());
  extend(order, layout::split_axes(layouts.update, mesh.mesh(), axes), "gradient", "update");
  result.update_levels = static_cast<int>(order.size());
  for (const std::string& name : order) {
    result.cuts.push_back(make_axis(mesh, name));
  }

  std::vector<std::string> data_axes;
  for (const std::string& name : {axes.replicate, axes.shard}) {
    if (!name.empty()) {
      data_axes.push_back(name);
      result.data_size *= mesh.mesh().axis_size(name);
    }
  }
  const std::vector<std::string> scattered(order.begin(), order.begin() + result.gradient_levels);
  for (const std::string& name : {axes.shard, axes.replicate}) {
    if (!name.empty() && !contains(scattered, name)) {
      result.summed.push_back(make_axis(mesh, name));
    }
  }
  result.control = mesh.world().communicator("data", mesh.mesh().group(data_axes, mesh.rank()));
  const std::vector<std::string> plan_axes = find_plan_axes(mesh.mesh(), axes);
  if (!plan_axes.empty()) {
    result.plan = mesh.world().communicator("plan", mesh.mesh().group(plan_axes, mesh.rank()));
  }
  return result;
}

}  // namespace hypershard::shard
