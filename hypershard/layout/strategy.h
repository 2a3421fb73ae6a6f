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
/// Errors: InvalidArgument if there is none, or hsdp/hierarchical is wanted and `replicate` is
/// missing.
DataAxes find_data_axes(const DeviceMesh& mesh, Strategy strategy);

/// Looks a strategy up in the table of the design.
PlaneLayouts plane_layouts(Strategy strategy, const DeviceMesh& mesh, const DataAxes& axes);

/// Which data axes a layout splits, innermost cut first: `shard` before `replicate`.
///
/// Flat buffers are cut first along `shard`, then each piece along `replicate`, so that an inner
/// reduction leaves a contiguous slice which the outer one cuts on.
std::vector<std::string> split_axes(
    const Layout& layout, const DeviceMesh& mesh, const DataAxes& axes
);

/// Checks a stated triple: what the runtime or gradient plane splits, the update plane must split
/// too. Errors: InvalidArgument saying which axis breaks the rule and why.
void check_plane_layouts(const PlaneLayouts& layouts, const DeviceMesh& mesh, const DataAxes& axes);

}  // namespace hypershard::layout
