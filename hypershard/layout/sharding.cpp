// Nested balanced cuts, and the checks of what may be cut.
// A range is narrowed cut by cut: no table of pieces is ever built.
#include "hypershard/layout/sharding.h"

#include <algorithm>
#include <cstddef>

#include "hypershard/core/error.h"
#include "hypershard/core/text.h"

namespace hypershard::layout {
namespace {

void check_shard_dim(const TensorSpec& spec, const DeviceMesh& mesh, std::size_t axis) {
  const int dim = spec.layout.placements[axis].dim;
  const auto num_dims = static_cast<int>(spec.shape.size());
  const std::string name = mesh.axes()[axis].name;
  if (num_dims == 0) {
    HS_FAIL(
        InvalidArgument,
        "layout.sharding: axis '",
        name,
        "' has Shard(",
        dim,
        ") of a tensor without dimensions",
        HS_HINT("a scalar can be Replicate or Partial")
    );
  }
  HS_CHECK(
      dim >= 0 && dim < num_dims,
      "layout.sharding: axis '",
      name,
      "' has Shard(",
      dim,
      ") of a tensor of shape ",
      spec.shape,
      " (expected a dimension from 0 to ",
      num_dims - 1,
      ")",
      HS_HINT(
          dim < 0 && dim >= -num_dims
              ? concat_text("count from the front: Shard(", dim + num_dims, ")")
              : concat_text("the tensor has ", num_dims, " dimensions")
      )
  );
}

void check_placement(const TensorSpec& spec, const DeviceMesh& mesh, std::size_t axis) {
  const Placement& placement = spec.layout.placements[axis];
  HS_CHECK(
      placement.kind != Placement::Kind::kFlat && placement.kind != Placement::Kind::kOwned,
      "layout.sharding: axis '",
      mesh.axes()[axis].name,
      "' is ",
      placement,
      ", which says how packed parameters rest, not how a tensor of shape ",
      spec.shape,
      " is cut (expected Replicate, Shard or Partial)",
      HS_HINT("state the layout of the whole tensor: data axes are Replicate for parameters")
  );
  if (placement.kind == Placement::Kind::kShard) {
    check_shard_dim(spec, mesh, axis);
  }
}

void check_cut_order(const TensorSpec& spec, const DeviceMesh& mesh) {
  const std::vector<int>& order = spec.layout.cut_order;
  for (const int axis : order) {
    HS_CHECK(
        axis >= 0 && axis < mesh.num_axes() && std::count(order.begin(), order.end(), axis) == 1,
        "layout.sharding: the order of cuts ",
        order,
        " must name axes 0 to ",
        mesh.num_axes() - 1,
        " of ",
        mesh,
        ", each at most once, but has ",
        axis
    );
  }
}

}  // namespace

Range nested_piece(Range whole, int num_pieces, int index) {
  const std::int64_t base = whole.numel() / num_pieces;
  const std::int64_t longer = whole.numel() % num_pieces;
  const std::int64_t begin = whole.begin + index * base + std::min<std::int64_t>(index, longer);
  return {begin, begin + base + (index < longer ? 1 : 0)};
}

Range cut_piece(std::int64_t size, int num_pieces, int index) {
  HS_CHECK(size >= 0, "layout.sharding: cannot cut ", size, " elements (expected at least 0)");
  HS_CHECK(
      num_pieces >= 1 && index >= 0 && index < num_pieces,
      "layout.sharding: there is no piece ",
      index,
      " of ",
      num_pieces,
      " (expected 0 to the number of pieces less one)"
  );
  return nested_piece({0, size}, num_pieces, index);
}

void check_spec(const TensorSpec& spec, const DeviceMesh& mesh) {
  HS_CHECK_EQ(
      spec.layout.placements.size(),
      mesh.axes().size(),
      "layout.sharding: a layout needs one placement for each axis of ",
      mesh,
      ", got [",
      to_text(spec.layout, mesh),
      "]"
  );
  for (const std::int64_t size : spec.shape) {
    HS_CHECK(size >= 0, "layout.sharding: the shape ", spec.shape, " has the negative size ", size);
  }
  for (std::size_t axis = 0; axis < mesh.axes().size(); ++axis) {
    check_placement(spec, mesh, axis);
  }
  check_cut_order(spec, mesh);
}

Layout replicated_layout(const DeviceMesh& mesh) {
  return {.placements = std::vector<Placement>(mesh.axes().size(), Placement::replicate())};
}

std::vector<Range> local_ranges(
    const TensorSpec& spec, const DeviceMesh& mesh, std::span<const int> coordinates
) {
  std::vector<Range> ranges;
  ranges.reserve(spec.shape.size());
  for (std::size_t dim = 0; dim < spec.shape.size(); ++dim) {
    Range range{0, spec.shape[dim]};
    for (const int axis : spec.layout.cut_axes(static_cast<int>(dim))) {
      const auto i = static_cast<std::size_t>(axis);
      range = nested_piece(range, mesh.axes()[i].size, coordinates[i]);
    }
    ranges.push_back(range);
  }
  return ranges;
}

std::vector<std::int64_t> local_shape(const TensorSpec& spec, const DeviceMesh& mesh, int rank) {
  check_spec(spec, mesh);
  std::vector<std::int64_t> shape;
  for (const Range& range : local_ranges(spec, mesh, mesh.coordinates(rank))) {
    shape.push_back(range.numel());
  }
  return shape;
}

std::vector<std::int64_t> local_offset(const TensorSpec& spec, const DeviceMesh& mesh, int rank) {
  check_spec(spec, mesh);
  std::vector<std::int64_t> offset;
  for (const Range& range : local_ranges(spec, mesh, mesh.coordinates(rank))) {
    offset.push_back(range.begin);
  }
  return offset;
}

std::vector<Range> ranges_along(
    const TensorSpec& spec, const DeviceMesh& mesh, int rank, int axis, int dim
) {
  check_spec(spec, mesh);
  HS_CHECK(
      axis >= 0 && axis < mesh.num_axes() && dim >= 0 && dim < static_cast<int>(spec.shape.size()),
      "layout.sharding: no axis ",
      axis,
      " of ",
      mesh,
      " or no dimension ",
      dim,
      " of a tensor of shape ",
      spec.shape
  );
  std::vector<int> coordinates = mesh.coordinates(rank);
  std::vector<Range> ranges;
  for (int i = 0; i < mesh.axes()[static_cast<std::size_t>(axis)].size; ++i) {
    coordinates[static_cast<std::size_t>(axis)] = i;
    ranges.push_back(local_ranges(spec, mesh, coordinates)[static_cast<std::size_t>(dim)]);
  }
  return ranges;
}

}  // namespace hypershard::layout
