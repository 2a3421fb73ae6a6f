// For the tests of this folder: layouts to go through, local tensors that stand for a known value
// under any layout, and the way back from local tensors to the value.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "hypershard/comm/world.h"
#include "hypershard/layout/sharding.h"
#include "hypershard/layout/tensor_spec.h"

namespace hypershard::dtensor::test {

using Shape = std::vector<std::int64_t>;
using Reduce = layout::Placement::Reduce;
using layout::Layout;
using layout::Placement;
using layout::TensorSpec;

inline layout::DeviceMesh mesh_of(const std::vector<int>& sizes) {
  std::vector<layout::MeshAxis> axes;
  int size = 1;
  for (const int axis_size : sizes) {
    axes.push_back({std::string(1, static_cast<char>('a' + axes.size())), axis_size});
    size *= axis_size;
  }
  return layout::DeviceMesh(axes, layout::Topology::single_supernode(size));
}

inline std::shared_ptr<const comm::ProcessMesh> process_mesh(
    const std::shared_ptr<comm::World>& world, const std::vector<int>& sizes
) {
  std::vector<layout::MeshAxis> axes;
  for (const int size : sizes) {
    axes.push_back({std::string(1, static_cast<char>('a' + axes.size())), size});
  }
  return std::make_shared<comm::ProcessMesh>(world, layout::DeviceMesh(axes, world->topology()));
}

/// All placements of a tensor with so many dimensions.
inline std::vector<Placement> all_placements(std::size_t num_dims) {
  std::vector<Placement> all = {
      Placement::replicate(),
      Placement::partial(),
      Placement::partial(Reduce::kAvg),
      Placement::partial(Reduce::kMax),
      Placement::partial(Reduce::kMin),
  };
  for (std::size_t dim = 0; dim < num_dims; ++dim) {
    all.push_back(Placement::shard(static_cast<int>(dim)));
  }
  return all;
}

/// All layouts over `num_axes` axes from `choices`; those that cut a dimension twice also with the
/// order of cuts reversed.
inline std::vector<Layout> all_layouts(
    const std::vector<Placement>& choices, std::size_t num_axes
) {
  std::vector<Layout> layouts = {{}};
  for (std::size_t axis = 0; axis < num_axes; ++axis) {
    std::vector<Layout> longer;
    for (const Layout& layout : layouts) {
      for (const Placement& placement : choices) {
        longer.push_back(layout);
        longer.back().placements.push_back(placement);
      }
    }
    layouts = longer;
  }
  const std::size_t in_mesh_order = layouts.size();
  for (std::size_t i = 0; i < in_mesh_order; ++i) {
    Layout reversed = layouts[i];
    for (std::size_t axis = num_axes; axis-- > 0;) {
      reversed.cut_order.push_back(static_cast<int>(axis));
    }
    if (reversed != layouts[i]) {
      layouts.push_back(reversed);
    }
  }
  return layouts;
}

/// Small integers, so that fp64 sums are exact; `term` makes other ones.
inline at::Tensor numbers(const Shape& shape, std::int64_t term = 0) {
  std::int64_t numel = 1;
  for (const std::int64_t size : shape) {
    numel *= size;
  }
  return ((at::arange(numel, at::kDouble) * 7 + term * 13).remainder(17) - 8).view(shape);
}

inline at::Tensor part_of(
    const at::Tensor& whole,
    const Layout& layout,
    const layout::DeviceMesh& mesh,
    const std::vector<int>& coordinates
) {
  at::Tensor part = whole;
  const auto ranges = layout::local_ranges({whole.sizes().vec(), layout}, mesh, coordinates);
  for (std::size_t dim = 0; dim < ranges.size(); ++dim) {
    part = part.narrow(static_cast<std::int64_t>(dim), ranges[dim].begin, ranges[dim].numel());
  }
  return part;
}

/// Joins the terms of all Partial axes, the last axis first.
inline at::Tensor reduced(
    const Layout& layout,
    const layout::DeviceMesh& mesh,
    const std::function<at::Tensor(const std::vector<int>&)>& term,
    std::vector<int> coordinates = {}
) {
  const std::size_t axis = coordinates.size();
  if (axis == layout.placements.size()) {
    return term(coordinates);
  }
  const Placement& placement = layout.placements[axis];
  const bool is_partial = placement.kind == Placement::Kind::kPartial;
  coordinates.push_back(0);
  at::Tensor value = reduced(layout, mesh, term, coordinates);
  for (int i = 1; is_partial && i < mesh.axes()[axis].size; ++i) {
    coordinates.back() = i;
    const at::Tensor next = reduced(layout, mesh, term, coordinates);
    value = placement.reduce == Reduce::kMax   ? at::maximum(value, next)
            : placement.reduce == Reduce::kMin ? at::minimum(value, next)
                                               : value + next;
  }
  return is_partial && placement.reduce == Reduce::kAvg ? value / mesh.axes()[axis].size : value;
}

/// The number of the term that a rank holds: differs where its Partial coordinates do.
inline std::int64_t term_number(const Layout& layout, const std::vector<int>& coordinates) {
  std::int64_t number = 0;
  for (std::size_t axis = 0; axis < coordinates.size(); ++axis) {
    const bool is_partial = layout.placements[axis].kind == Placement::Kind::kPartial;
    number = number * 5 + (is_partial ? coordinates[axis] + 1 : 0);
  }
  return number;
}

/// The value that `local_tensor` stands for.
inline at::Tensor value_of(const TensorSpec& spec, const layout::DeviceMesh& mesh) {
  return reduced(spec.layout, mesh, [&](const std::vector<int>& coordinates) {
    return numbers(spec.shape, term_number(spec.layout, coordinates));
  });
}

/// What `rank` holds of `value_of(spec)`.
inline at::Tensor local_tensor(const TensorSpec& spec, const layout::DeviceMesh& mesh, int rank) {
  const std::vector<int> coordinates = mesh.coordinates(rank);
  const at::Tensor whole = numbers(spec.shape, term_number(spec.layout, coordinates));
  return part_of(whole, spec.layout, mesh, coordinates).clone();
}

/// Joins all ranks' local tensors (by rank) to the value they stand for. Ranks that must hold the
/// same are compared: `differ` counts those that do not.
inline at::Tensor assembled(
    const std::vector<at::Tensor>& locals,
    const TensorSpec& spec,
    const layout::DeviceMesh& mesh,
    int& differ
) {
  return reduced(spec.layout, mesh, [&](const std::vector<int>& term) {
    at::Tensor whole = at::full(spec.shape, std::nan(""), at::kDouble);
    for (int rank = 0; rank < mesh.size(); ++rank) {
      const std::vector<int> coordinates = mesh.coordinates(rank);
      bool has_term = true;
      for (std::size_t axis = 0; axis < term.size(); ++axis) {
        has_term &= spec.layout.placements[axis].kind != Placement::Kind::kPartial ||
                    term[axis] == coordinates[axis];
      }
      if (!has_term) {
        continue;
      }
      const at::Tensor place = part_of(whole, spec.layout, mesh, coordinates);
      const at::Tensor& local = locals[static_cast<std::size_t>(rank)];
      if (local.sizes() != place.sizes() ||
          (!place.isnan().any().item<bool>() && !place.equal(local))) {
        ++differ;
        continue;
      }
      place.copy_(local);
    }
    return whole;
  });
}

}  // namespace hypershard::dtensor::test
