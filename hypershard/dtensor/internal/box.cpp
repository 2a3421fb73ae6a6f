// Integer work on boxes. Runs are told by the first dimension in which a part is shorter than the
// whole: only single indices may come before it.
#include "hypershard/dtensor/internal/box.h"

#include <algorithm>
#include <cstddef>

namespace hypershard::dtensor::internal {
namespace {

/// Returns where `part` starts in the memory of `whole` if it is one run there.
std::optional<std::int64_t> run_offset(const Box& part, const Box& whole) {
  std::int64_t offset = 0;
  bool is_single = true;  // all dimensions so far have one index in `part`
  for (std::size_t dim = 0; dim < whole.size(); ++dim) {
    const bool is_full = part[dim] == whole[dim];
    if (!is_full && !is_single) {
      return std::nullopt;
    }
    is_single = is_single && part[dim].numel() == 1;
    offset = offset * whole[dim].numel() + part[dim].begin - whole[dim].begin;
  }
  return offset;
}

}  // namespace

std::vector<std::int64_t> shape_of(const Box& box) {
  std::vector<std::int64_t> shape;
  shape.reserve(box.size());
  for (const layout::Range& range : box) {
    shape.push_back(range.numel());
  }
  return shape;
}

std::int64_t numel_of(const Box& box) {
  std::int64_t product = 1;
  for (const layout::Range& range : box) {
    product *= range.numel();
  }
  return product;
}

Box intersect(const Box& a, const Box& b) {
  Box common;
  common.reserve(a.size());
  for (std::size_t dim = 0; dim < a.size(); ++dim) {
    common.push_back(layout::intersect(a[dim], b[dim]));
  }
  return common;
}

at::Tensor view_of(const at::Tensor& local, const Box& whole, const Box& part) {
  at::Tensor view = local;
  for (std::size_t dim = 0; dim < whole.size(); ++dim) {
    if (part[dim] != whole[dim]) {
      view = view.narrow(
          static_cast<std::int64_t>(dim), part[dim].begin - whole[dim].begin, part[dim].numel()
      );
    }
  }
  return view;
}

bool are_consecutive_runs(const std::vector<Box>& parts, const Box& whole) {
  std::int64_t next = 0;
  for (const Box& part : parts) {
    const std::int64_t numel = numel_of(part);
    if (numel == 0) {
      continue;
    }
    if (run_offset(part, whole) != next) {
      return false;
    }
    next += numel;
  }
  return next == numel_of(whole);
}

}  // namespace hypershard::dtensor::internal
