// The table of sharding strategies: each is three layouts (runtime, gradient, update), nothing
// else. All communication of a step is derived from these; no strategy has code of its own.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hypershard/layout/mesh.h"
#include "hypershard/layout/placement.h"

namespace hypershard::layout {

/// Names the rows of the table that `plane_layouts` looks up.
enum class Strategy { kDdp, kZero1, kZero2, kZero3, kHsdp, kHierarchical };
std::string to_text(Strategy strategy);

/// Parses `ddp|zero1|zero2|zero3|hsdp|hierarchical`; `fsdp` means zero3.
/// Errors: InvalidArgument naming the nearest valid name.
Strategy parse_strategy(std::string_view name);

/// The layouts of a group's three planes on the whole mesh.
struct PlaneLayouts {
  Layout runtime;   ///< the parameters that kernels read
  Layout gradient;  ///< where a reduced gradient comes to rest
  Layout update;    ///< what the optimizer owns
};

/// The data axes a strategy works on. Absent axes are left empty.
struct DataAxes {
  std::string replicate = {};  ///< between supernodes, may be ""
  std::string shard = {};      ///< inside, may be ""
};

/// Finds the axes named `replicate` and `shard` (or `dp`, read as `shard`) in a mesh.
/// Errors: InvalidArgument if there is none, if there are both `shard` and `dp`, or if one of the
/// two is missing for hsdp or hierarchical, which need both (size 1 is enough).
DataAxes find_data_axes(const DeviceMesh& mesh, Strategy strategy);

/// Looks a strategy up in the table of the design; every axis that is no data axis is Replicate.
///
/// | strategy     | runtime              | gradient             | update (on replicate, shard) |
/// |--------------|----------------------|----------------------|------------------------------|
/// | ddp          | Replicate, Replicate | Replicate, Replicate | Replicate, Replicate         |
/// | zero1        | Replicate, Replicate | Replicate, Replicate | Flat, Flat                   |
/// | zero2        | Replicate, Replicate | Flat, Flat           | Flat, Flat                   |
/// | zero3        | Flat, Flat           | Flat, Flat           | Flat, Flat                   |
/// | hsdp         | Replicate, Flat      | Replicate, Flat      | Replicate, Flat              |
/// | hierarchical | Replicate, Flat      | Flat, Flat           | Flat, Flat                   |
///
/// Errors: InvalidArgument if `axes` names none, the same twice or an unknown one, or only one for
/// hsdp or hierarchical.
PlaneLayouts plane_layouts(Strategy strategy, const DeviceMesh& mesh, const DataAxes& axes);

/// Lists the data axes that a layout splits, in the order of the cuts: `shard` before `replicate`.
///
/// Flat buffers are cut first along `shard`, then each piece along `replicate`, so that a reduction
/// inside the supernode leaves a contiguous slice which the one between supernodes cuts on. The
/// list is the order of `PackOptions::cut_sizes`, and `mesh.group(list, rank)` that of the pieces.
/// Errors: InvalidArgument if the layout does not have one placement for each axis of the mesh.
std::vector<std::string> split_axes(
    const Layout& layout, const DeviceMesh& mesh, const DataAxes& axes
);

/// Checks a stated triple.
///
/// What the runtime or gradient plane splits, the update plane must split too. Cuts must nest:
/// where the update plane is cut along both data axes, no other plane is cut along `replicate`
/// alone. No plane rests Partial, but for gradients on axes that are no data axes.
/// Errors: InvalidArgument saying which axis breaks which rule, and why.
void check_plane_layouts(const PlaneLayouts& layouts, const DeviceMesh& mesh, const DataAxes& axes);

}  // namespace hypershard::layout
