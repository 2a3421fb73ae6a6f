// Text forms of placements and layouts.
// Messages, plans and the explain report all print layouts through these functions.
#include "hypershard/layout/placement.h"

#include <algorithm>
#include <cstddef>

#include "hypershard/core/error.h"

namespace hypershard::layout {
namespace {

std::string reduce_text(Placement::Reduce reduce) {
  switch (reduce) {
    case Placement::Reduce::kSum:
      return "sum";
    case Placement::Reduce::kAvg:
      return "avg";
    case Placement::Reduce::kMax:
      return "max";
    case Placement::Reduce::kMin:
      return "min";
  }
  HS_FAIL(InternalError, "layout.placement: no reduction has number ", static_cast<int>(reduce));
}

std::size_t cut_rank(const Layout& layout, int axis) {
  const auto& order = layout.cut_order;
  const auto found = std::find(order.begin(), order.end(), axis);
  return found != order.end() ? static_cast<std::size_t>(found - order.begin())
                              : order.size() + static_cast<std::size_t>(axis);
}

std::string axis_text(const DeviceMesh& mesh, std::size_t axis) {
  return axis < mesh.axes().size() ? mesh.axes()[axis].name
                                   : "axis " + std::to_string(axis) + " (not in the mesh)";
}

/// Writes the nested cuts that do not follow the mesh's axis order.
std::string cut_order_text(const Layout& layout, const DeviceMesh& mesh) {
  std::string text;
  for (std::size_t i = 0; i < layout.placements.size(); ++i) {
    if (layout.placements[i].kind != Placement::Kind::kShard) {
      continue;
    }
    const int dim = layout.placements[i].dim;
    const std::vector<int> axes = layout.cut_axes(dim);
    const bool is_first = *std::min_element(axes.begin(), axes.end()) == static_cast<int>(i);
    if (!is_first || std::is_sorted(axes.begin(), axes.end())) {
      continue;
    }
    text += " (dimension " + std::to_string(dim) + " cut by ";
    for (std::size_t k = 0; k < axes.size(); ++k) {
      text += (k == 0 ? "" : ", then ") + axis_text(mesh, static_cast<std::size_t>(axes[k]));
    }
    text += ")";
  }
  return text;
}

}  // namespace

std::string to_text(const Placement& placement) {
  switch (placement.kind) {
    case Placement::Kind::kReplicate:
      return "Replicate";
    case Placement::Kind::kShard:
      return "Shard(" + std::to_string(placement.dim) + ")";
    case Placement::Kind::kPartial:
      return "Partial(" + reduce_text(placement.reduce) + ")";
    case Placement::Kind::kFlat:
      return "Flat";
    case Placement::Kind::kOwned:
      return "Owned";
  }
  HS_FAIL(
      InternalError, "layout.placement: no placement has number ", static_cast<int>(placement.kind)
  );
}

std::vector<int> Layout::cut_axes(int dim) const {
  std::vector<int> axes;
  for (std::size_t i = 0; i < placements.size(); ++i) {
    if (placements[i].kind == Placement::Kind::kShard && placements[i].dim == dim) {
      axes.push_back(static_cast<int>(i));
    }
  }
  if (!cut_order.empty()) {
    std::stable_sort(axes.begin(), axes.end(), [&](int a, int b) {
      return cut_rank(*this, a) < cut_rank(*this, b);
    });
  }
  return axes;
}

bool Layout::operator==(const Layout& other) const {
  if (placements != other.placements) {
    return false;
  }
  if (cut_order == other.cut_order) {
    return true;
  }
  return std::all_of(placements.begin(), placements.end(), [&](const Placement& placement) {
    return placement.kind != Placement::Kind::kShard ||
           cut_axes(placement.dim) == other.cut_axes(placement.dim);
  });
}

Layout gradient_layout(const Layout& layout) {
  Layout gradient = layout;
  for (Placement& placement : gradient.placements) {
    if (placement.kind == Placement::Kind::kPartial) {
      placement = Placement::replicate();
    }
  }
  return gradient;
}

std::string to_text(const Layout& layout, const DeviceMesh& mesh) {
  // Never throws for a layout that does not fit: it is called to say exactly that.
  std::string text;
  for (std::size_t i = 0; i < layout.placements.size(); ++i) {
    text += i == 0 ? "" : ", ";
    text += axis_text(mesh, i);
    text += ": " + to_text(layout.placements[i]);
  }
  for (std::size_t i = layout.placements.size(); i < mesh.axes().size(); ++i) {
    text += (i == 0 ? "" : ", ") + mesh.axes()[i].name + ": missing";
  }
  return text + cut_order_text(layout, mesh);
}

}  // namespace hypershard::layout
