// Coordinate arithmetic of a row-major grid of ranks.
// Nothing is tabulated: every answer is computed from the sizes and strides of the axes.
#include "hypershard/layout/mesh.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "hypershard/core/error.h"
#include "hypershard/core/suggest.h"

namespace hypershard::layout {
namespace {

std::vector<std::string> axis_names(const std::vector<MeshAxis>& axes) {
  std::vector<std::string> names;
  names.reserve(axes.size());
  for (const MeshAxis& axis : axes) {
    names.push_back(axis.name);
  }
  return names;
}

std::string axes_text(const std::vector<MeshAxis>& axes) {
  std::string text;
  for (const MeshAxis& axis : axes) {
    text += (text.empty() ? "" : ", ") + axis.name + "=" + std::to_string(axis.size);
  }
  return text;
}

void check_axes(const std::vector<MeshAxis>& axes) {
  for (std::size_t i = 0; i < axes.size(); ++i) {
    HS_CHECK(
        !axes[i].name.empty(),
        "layout.mesh: axis ",
        i,
        " of ",
        axes.size(),
        " has no name (expected one like replicate, shard, tp)"
    );
    HS_CHECK(
        axes[i].size >= 1,
        "layout.mesh: axis '",
        axes[i].name,
        "' has size ",
        axes[i].size,
        " (expected at least 1)",
        HS_HINT("leave an axis out, or give it size 1, if the job is not cut along it")
    );
    const auto same_name = [&](const MeshAxis& axis) { return axis.name == axes[i].name; };
    const auto first = std::find_if(axes.begin(), axes.end(), same_name) - axes.begin();
    HS_CHECK(
        first == static_cast<std::ptrdiff_t>(i),
        "layout.mesh: axis name '",
        axes[i].name,
        "' is given twice: axes ",
        first,
        " and ",
        i,
        " (expected distinct names)"
    );
  }
}

void check_size(const std::vector<MeshAxis>& axes, int world_size) {
  std::int64_t product = 1;
  for (const MeshAxis& axis : axes) {
    // Sizes are at least 1, so that a product once too large stays too large: stop before it
    // overflows.
    product = product > world_size ? product : product * axis.size;
  }
  HS_CHECK(
      product == world_size,
      "layout.mesh: the axes (",
      axes_text(axes),
      ") hold ",
      product > world_size ? "more than " : "",
      product > world_size ? world_size : product,
      " ranks, but the job has ",
      world_size,
      HS_HINT("the product of the axis sizes must equal the number of ranks")
  );
}

void check_rank(int rank, int size) {
  HS_CHECK(
      rank >= 0 && rank < size,
      "layout.mesh: rank ",
      rank,
      " is out of range (expected 0 to ",
      size - 1,
      ")"
  );
}

std::vector<std::size_t> group_axis_indices(
    const DeviceMesh& mesh, std::span<const std::string> group_axes
) {
  std::vector<std::size_t> indices;
  for (const std::string& name : group_axes) {
    indices.push_back(static_cast<std::size_t>(mesh.axis_index(name)));
    HS_CHECK(
        std::count(group_axes.begin(), group_axes.end(), name) == 1,
        "layout.mesh: axis '",
        name,
        "' is repeated among the group's axes ",
        group_axes,
        " (expected each once)"
    );
  }
  return indices;
}

}  // namespace

DeviceMesh::DeviceMesh(std::vector<MeshAxis> axes, Topology topology)
    : axes_(std::move(axes)), strides_(axes_.size(), 1), topology_(std::move(topology)) {
  check_axes(axes_);
  check_size(axes_, size());
  for (std::size_t i = axes_.size(); i-- > 1;) {
    strides_[i - 1] = strides_[i] * axes_[i].size;
  }
}

bool DeviceMesh::has_axis(std::string_view name) const {
  return std::any_of(axes_.begin(), axes_.end(), [&](const MeshAxis& axis) {
    return axis.name == name;
  });
}

int DeviceMesh::axis_index(std::string_view name) const {
  for (std::size_t i = 0; i < axes_.size(); ++i) {
    if (axes_[i].name == name) {
      return static_cast<int>(i);
    }
  }
  HS_FAIL(
      InvalidArgument,
      "layout.mesh: unknown axis '",
      name,
      "': ",
      axes_.empty() ? "the mesh has no axes" : "the mesh has axes " + axes_text(axes_),
      HS_HINT(suggestion(name, axis_names(axes_)))
  );
}

int DeviceMesh::axis_size(std::string_view name) const {
  return axes_[static_cast<std::size_t>(axis_index(name))].size;
}

int DeviceMesh::coordinate(int rank, std::string_view axis) const {
  check_rank(rank, size());
  const auto i = static_cast<std::size_t>(axis_index(axis));
  return rank / strides_[i] % axes_[i].size;
}

std::vector<int> DeviceMesh::coordinates(int rank) const {
  check_rank(rank, size());
  std::vector<int> coordinates;
  coordinates.reserve(axes_.size());
  for (std::size_t i = 0; i < axes_.size(); ++i) {
    coordinates.push_back(rank / strides_[i] % axes_[i].size);
  }
  return coordinates;
}

std::vector<int> DeviceMesh::group(std::span<const std::string> group_axes, int rank) const {
  check_rank(rank, size());
  std::vector<int> ranks = {rank};
  for (const std::size_t i : group_axis_indices(*this, group_axes)) {
    std::vector<int> spread;
    spread.reserve(ranks.size() * static_cast<std::size_t>(axes_[i].size));
    for (const int member : ranks) {
      const int origin = member - member / strides_[i] % axes_[i].size * strides_[i];
      for (int coordinate = 0; coordinate < axes_[i].size; ++coordinate) {
        spread.push_back(origin + coordinate * strides_[i]);
      }
    }
    ranks = std::move(spread);
  }
  return ranks;
}

Tier DeviceMesh::tier(std::span<const std::string> group_axes) const {
  const std::vector<std::size_t> indices = group_axis_indices(*this, group_axes);
  for (int rank = 0; rank < size(); ++rank) {
    // Each rank against the first of its group: every group is covered without being listed.
    int first = rank;
    for (const std::size_t i : indices) {
      first -= first / strides_[i] % axes_[i].size * strides_[i];
    }
    if (topology_.supernode_of(rank) != topology_.supernode_of(first)) {
      return Tier::kInter;
    }
  }
  return Tier::kIntra;
}

std::string to_text(Tier tier) {
  switch (tier) {
    case Tier::kIntra:
      return "intra";
    case Tier::kInter:
      return "inter";
  }
  HS_FAIL(InternalError, "layout.mesh: no tier has number ", static_cast<int>(tier));
}

std::string to_text(const DeviceMesh& mesh) {
  return "mesh(" + axes_text(mesh.axes()) + ")";
}

}  // namespace hypershard::layout
