// See known_cuts.h.
#include "hypershard/plan/internal/known_cuts.h"

namespace hypershard::plan::internal {

std::vector<int> KnownCuts::axes_of(const layout::Layout& layout, std::size_t dim) const {
  std::vector<int> axes = layout.cut_axes(static_cast<int>(dim));
  std::erase_if(axes, [this](int axis) {
    return mesh_.axes()[static_cast<std::size_t>(axis)].size == 1;
  });
  return axes;
}

void KnownCuts::note(
    int number, const layout::TensorSpec& arriving, const layout::Layout& leaving
) {
  for (std::size_t dim = 0; dim < arriving.shape.size(); ++dim) {
    const auto axes = axes_of(leaving, dim);
    if (!axes.empty() && axes != axes_of(arriving.layout, dim)) {
      const CutOrigin origin{.boundary = number, .dim = static_cast<int>(dim)};
      cuts_.push_back({axes, arriving.shape[dim], origin});
    }
  }
}

std::vector<CutOrigin> KnownCuts::origins(const layout::TensorSpec& spec) const {
  std::vector<CutOrigin> origins(spec.shape.size());
  for (std::size_t dim = 0; dim < spec.shape.size(); ++dim) {
    const auto axes = axes_of(spec.layout, dim);
    bool is_in_place = false;
    for (const Cut& cut : cuts_) {
      const bool same_dim = cut.origin.dim == static_cast<int>(dim);
      const bool fits = !axes.empty() && cut.axes == axes && cut.size == spec.shape[dim];
      if (fits && (same_dim || !is_in_place)) {
        origins[dim] = cut.origin;
        is_in_place = same_dim;
      }
    }
  }
  return origins;
}

}  // namespace hypershard::plan::internal
