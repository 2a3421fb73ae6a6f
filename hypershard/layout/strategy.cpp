// The table of strategies, and the rule that any stated triple of layouts must keep.
// Adding a strategy is adding a row.
#include "hypershard/layout/strategy.h"

#include <algorithm>
#include <array>

#include "hypershard/core/error.h"
#include "hypershard/core/suggest.h"

namespace hypershard::layout {
namespace {

using Kind = Placement::Kind;
constexpr Kind kWhole = Kind::kReplicate;
constexpr Kind kFlat = Kind::kFlat;

/// One plane of a row: how it lies on the two data axes.
struct DataCut {
  Kind replicate;
  Kind shard;
};

struct Row {
  Strategy strategy;
  std::string_view name;
  DataCut runtime;
  DataCut gradient;
  DataCut update;
  bool needs_both_axes;
};

constexpr std::array<Row, 6> kTable = {{
    {Strategy::kDdp, "ddp", {kWhole, kWhole}, {kWhole, kWhole}, {kWhole, kWhole}, false},
    {Strategy::kZero1, "zero1", {kWhole, kWhole}, {kWhole, kWhole}, {kFlat, kFlat}, false},
    {Strategy::kZero2, "zero2", {kWhole, kWhole}, {kFlat, kFlat}, {kFlat, kFlat}, false},
    {Strategy::kZero3, "zero3", {kFlat, kFlat}, {kFlat, kFlat}, {kFlat, kFlat}, false},
    {Strategy::kHsdp, "hsdp", {kWhole, kFlat}, {kWhole, kFlat}, {kWhole, kFlat}, true},
    {Strategy::kHierarchical, "hierarchical", {kWhole, kFlat}, {kFlat, kFlat}, {kFlat, kFlat}, true
    },
}};

const Row& row_of(Strategy strategy) {
  for (const Row& row : kTable) {
    if (row.strategy == strategy) {
      return row;
    }
  }
  HS_FAIL(InternalError, "layout.strategy: no strategy has number ", static_cast<int>(strategy));
}

void check_axes_suffice(const Row& row, const DeviceMesh& mesh, const DataAxes& axes) {
  HS_CHECK(
      !axes.replicate.empty() || !axes.shard.empty(),
      "layout.strategy: strategy '",
      row.name,
      "' finds no data axis: ",
      mesh,
      " (expected an axis 'shard' or 'dp', or 'replicate')",
      HS_HINT("name the axis along which the ranks take different data 'shard'")
  );
  HS_CHECK(
      axes.replicate != axes.shard,
      "layout.strategy: axis '",
      axes.shard,
      "' is named both as replicate and as shard axis (expected two axes, or one of them left "
      "empty)"
  );
  if (!row.needs_both_axes) {
    return;
  }
  const std::string_view missing =
      axes.replicate.empty() ? "replicate" : (axes.shard.empty() ? "shard" : "");
  HS_CHECK(
      missing.empty(),
      "layout.strategy: strategy '",
      row.name,
      "' needs an axis '",
      missing,
      "': ",
      mesh,
      HS_HINT(
          "add the axis, of size 1 if there is nothing along it, or choose ",
          missing == "replicate" ? "zero3" : "ddp"
      )
  );
}

Layout lay_out(const DataCut& cut, const DeviceMesh& mesh, const DataAxes& axes) {
  Layout layout;
  layout.placements.resize(mesh.axes().size());
  const auto place = [&](const std::string& axis, Kind kind) {
    if (!axis.empty()) {
      layout.placements[static_cast<std::size_t>(mesh.axis_index(axis))] = {.kind = kind};
    }
  };
  place(axes.replicate, cut.replicate);
  place(axes.shard, cut.shard);
  return layout;
}

void check_fits(std::string_view plane, const Layout& layout, const DeviceMesh& mesh) {
  HS_CHECK(
      layout.placements.size() == mesh.axes().size(),
      "layout.strategy: the ",
      plane,
      " layout has ",
      layout.placements.size(),
      " placements, but ",
      mesh,
      " has ",
      mesh.num_axes(),
      " axes: ",
      to_text(layout, mesh),
      HS_HINT("state one placement for each axis, in the mesh's order")
  );
}

void check_not_partial(std::string_view plane, const Placement& placement, const MeshAxis& axis) {
  HS_CHECK(
      placement.kind != Kind::kPartial,
      "layout.strategy: the ",
      plane,
      " layout is ",
      placement,
      " on axis '",
      axis.name,
      "' (expected Replicate, Shard, Flat or Owned)",
      HS_HINT("a plane states where values rest once reduced; Partial is a value on its way there")
  );
}

/// Cuts nest in one order: a piece of the inner cut must lie inside one piece of the outer.
void check_nests(
    std::string_view plane,
    const PlaneLayouts& layouts,
    const Layout& layout,
    const DeviceMesh& mesh,
    const DataAxes& axes
) {
  const std::vector<std::string> update_axes = split_axes(layouts.update, mesh, axes);
  const std::vector<std::string> plane_axes = split_axes(layout, mesh, axes);
  HS_CHECK(
      std::equal(
          plane_axes.begin(),
          plane_axes.end(),
          update_axes.begin(),
          update_axes.begin() + static_cast<std::ptrdiff_t>(plane_axes.size())
      ),
      "layout.strategy: the update layout is cut first along '",
      axes.shard,
      "', but the ",
      plane,
      " layout along '",
      axes.replicate,
      "' only: ",
      to_text(layout, mesh),
      HS_HINT("cut the ", plane, " layout along '", axes.shard, "' too, or not at all")
  );
}

}  // namespace

std::string to_text(Strategy strategy) {
  return std::string(row_of(strategy).name);
}

Strategy parse_strategy(std::string_view name) {
  if (name == "fsdp") {
    return Strategy::kZero3;
  }
  std::vector<std::string> names;
  for (const Row& row : kTable) {
    if (row.name == name) {
      return row.strategy;
    }
    names.emplace_back(row.name);
  }
  names.emplace_back("fsdp");
  HS_FAIL(
      InvalidArgument,
      "layout.strategy: unknown strategy '",
      name,
      "' (expected one of ",
      names,
      ")",
      HS_HINT(suggestion(name, names))
  );
}

DataAxes find_data_axes(const DeviceMesh& mesh, Strategy strategy) {
  HS_CHECK(
      !(mesh.has_axis("shard") && mesh.has_axis("dp")),
      "layout.strategy: ",
      mesh,
      " has both 'shard' and 'dp', which mean the same axis",
      HS_HINT("rename one of them, or name the data axes yourself")
  );
  DataAxes axes;
  axes.replicate = mesh.has_axis("replicate") ? "replicate" : "";
  axes.shard = mesh.has_axis("shard") ? "shard" : (mesh.has_axis("dp") ? "dp" : "");
  check_axes_suffice(row_of(strategy), mesh, axes);
  return axes;
}

PlaneLayouts plane_layouts(Strategy strategy, const DeviceMesh& mesh, const DataAxes& axes) {
  const Row& row = row_of(strategy);
  check_axes_suffice(row, mesh, axes);
  return {
      .runtime = lay_out(row.runtime, mesh, axes),
      .gradient = lay_out(row.gradient, mesh, axes),
      .update = lay_out(row.update, mesh, axes),
  };
}

std::vector<std::string> split_axes(
    const Layout& layout, const DeviceMesh& mesh, const DataAxes& axes
) {
  check_fits("given", layout, mesh);
  std::vector<std::string> names;
  for (const std::string& axis : {axes.shard, axes.replicate}) {
    if (!axis.empty() &&
        layout.placements[static_cast<std::size_t>(mesh.axis_index(axis))].splits()) {
      names.push_back(axis);
    }
  }
  return names;
}

void check_plane_layouts(
    const PlaneLayouts& layouts, const DeviceMesh& mesh, const DataAxes& axes
) {
  check_fits("runtime", layouts.runtime, mesh);
  check_fits("gradient", layouts.gradient, mesh);
  check_fits("update", layouts.update, mesh);
  for (std::size_t i = 0; i < mesh.axes().size(); ++i) {
    const MeshAxis& axis = mesh.axes()[i];
    const Placement& runtime = layouts.runtime.placements[i];
    const Placement& gradient = layouts.gradient.placements[i];
    const Placement& update = layouts.update.placements[i];
    const bool is_data_axis = axis.name == axes.replicate || axis.name == axes.shard;
    check_not_partial("runtime", runtime, axis);
    check_not_partial("update", update, axis);
    if (is_data_axis) {
      check_not_partial("gradient", gradient, axis);
    }
    HS_CHECK(
        update.splits() || !(runtime.splits() || gradient.splits()),
        "layout.strategy: axis '",
        axis.name,
        "' is split by the ",
        runtime.splits() ? "runtime" : "gradient",
        " layout (",
        runtime.splits() ? runtime : gradient,
        ") but not by the update layout (",
        update,
        "): a rank would update elements whose ",
        runtime.splits() ? "runtime values it does not hold" : "gradient it never receives",
        HS_HINT("split the update layout along '", axis.name, "' too, or the other one not at all")
    );
  }
  check_nests("runtime", layouts, layouts.runtime, mesh, axes);
  check_nests("gradient", layouts, layouts.gradient, mesh, axes);
}

}  // namespace hypershard::layout
