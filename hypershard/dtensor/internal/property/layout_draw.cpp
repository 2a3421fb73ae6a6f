// One mode of choice for each axis.
#include "hypershard/dtensor/internal/property/layout_draw.h"

#include <algorithm>

namespace hypershard::dtensor::property {
namespace {

using layout::Placement;
using layout::TensorSpec;

class LayoutDraw {
 public:
  LayoutDraw(const Tensors& tensors, const layout::DeviceMesh& mesh, Random& random)
      : tensors_(tensors), random_(random) {
    for (const at::Tensor& tensor : tensors) {
      specs_.push_back({tensor.sizes().vec(), {}});
    }
    for (int axis = 0; axis < mesh.num_axes(); ++axis) {
      for (TensorSpec& spec : specs_) {
        spec.layout.placements.push_back(Placement::replicate());
      }
      const std::int64_t mode = draw(random_, 10);
      if (!tensors.empty() && mode < 5) {
        cut_by_size();
      } else if (!tensors.empty() && mode < 8) {
        make_partial();
      } else if (mode < 9) {
        choose_blindly();
      }
    }
  }

  std::vector<TensorSpec> specs() && { return std::move(specs_); }

 private:
  std::size_t any() { return static_cast<std::size_t>(draw(random_, count())); }
  std::int64_t count() const { return static_cast<std::int64_t>(tensors_.size()); }

  void cut_by_size() {
    const at::Tensor& chosen = tensors_[any()];
    if (chosen.dim() == 0) {
      return;
    }
    const std::int64_t size = chosen.size(draw(random_, chosen.dim()));
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      std::vector<int> dims;
      for (int dim = 0; dim < tensors_[i].dim(); ++dim) {
        if (tensors_[i].size(dim) == size) {
          dims.push_back(dim);
        }
      }
      if (!dims.empty() && chance(random_, 0.95)) {
        const bool is_first = chance(random_, 0.6);
        const auto pick = draw(random_, static_cast<std::int64_t>(dims.size()));
        specs_[i].layout.placements.back() =
            Placement::shard(dims[is_first ? 0 : static_cast<std::size_t>(pick)]);
      }
    }
  }

  bool can_be_partial(std::size_t i) const { return at::isFloatingType(tensors_[i].scalar_type()); }

  void make_partial() {
    constexpr Placement::Reduce kReduces[] = {
        Placement::Reduce::kSum,
        Placement::Reduce::kSum,
        Placement::Reduce::kAvg,
        Placement::Reduce::kMax,
        Placement::Reduce::kMin
    };
    const Placement::Reduce reduce = kReduces[draw(random_, 5)];
    const bool is_one = chance(random_, 0.6);
    const std::size_t one = any();
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const bool is_chosen = is_one ? i == one : chance(random_, 0.7);
      if (is_chosen && can_be_partial(i) && fits(i, reduce)) {
        specs_[i].layout.placements.back() = Placement::partial(reduce);
      }
    }
  }

  /// Sums beside maxima depend on the order of reductions: kept apart here.
  bool fits(std::size_t i, Placement::Reduce reduce) const {
    const auto& placements = specs_[i].layout.placements;
    return std::all_of(placements.begin(), placements.end(), [&](const Placement& placement) {
      return placement.kind != Placement::Kind::kPartial || placement.reduce == reduce;
    });
  }

  void choose_blindly() {
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const std::int64_t rank = tensors_[i].dim();
      const std::int64_t choice = draw(random_, rank + 2);
      if (choice < rank) {
        specs_[i].layout.placements.back() = Placement::shard(static_cast<int>(choice));
      } else if (choice == rank && can_be_partial(i) && fits(i, Placement::Reduce::kSum)) {
        specs_[i].layout.placements.back() = Placement::partial();
      }
    }
  }

  const Tensors& tensors_;
  Random& random_;
  std::vector<TensorSpec> specs_;
};

}  // namespace

std::vector<TensorSpec> draw_layouts(
    const Tensors& tensors, const layout::DeviceMesh& mesh, Random& random
) {
  return LayoutDraw(tensors, mesh, random).specs();
}

}  // namespace hypershard::dtensor::property
