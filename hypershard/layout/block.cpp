// See block.h. Rows are the longest stretches that are contiguous in both blocks.
#include "hypershard/layout/block.h"

#include <algorithm>
#include <cstddef>

#include "hypershard/core/error.h"
#include "hypershard/core/text.h"

namespace hypershard::layout {
namespace {

std::vector<std::int64_t> strides_of(const Block& block) {
  std::vector<std::int64_t> strides(block.ranges.size(), 1);
  for (std::size_t dim = strides.size(); dim-- > 1;) {
    strides[dim - 1] = strides[dim] * block.ranges[dim].numel();
  }
  return strides;
}

/// The first element of a row in one block, and how it moves with the row.
struct Cursor {
  std::vector<std::int64_t> strides;
  std::int64_t at = 0;

  Cursor(const Block& block, const std::vector<Range>& common) : strides(strides_of(block)) {
    for (std::size_t dim = 0; dim < common.size(); ++dim) {
      at += (common[dim].begin - block.ranges[dim].begin) * strides[dim];
    }
  }
  void move(std::size_t dim, std::int64_t steps) { at += steps * strides[dim]; }
};

}  // namespace

std::vector<std::int64_t> Block::local_shape() const {
  std::vector<std::int64_t> local;
  for (const Range& range : ranges) {
    local.push_back(range.numel());
  }
  return local;
}

std::int64_t Block::numel() const {
  std::int64_t numel = 1;
  for (const Range& range : ranges) {
    numel *= range.numel();
  }
  return numel;
}

bool Block::is_whole() const {
  return local_shape() == shape;
}

std::string to_text(const Block& block) {
  std::string text = "[";
  for (std::size_t dim = 0; dim < block.ranges.size(); ++dim) {
    text += concat_text(dim == 0 ? "" : ",", block.ranges[dim].begin, ":", block.ranges[dim].end);
  }
  return text + "]";
}

Block whole_block(std::vector<std::int64_t> shape) {
  Block block;
  for (const std::int64_t size : shape) {
    block.ranges.push_back({0, size});
  }
  block.shape = std::move(shape);
  return block;
}

Block local_block(
    const TensorSpec& spec, const DeviceMesh& mesh, std::span<const int> coordinates
) {
  return {.shape = spec.shape, .ranges = local_ranges(spec, mesh, coordinates)};
}

std::vector<BlockRun> common_runs(const Block& a, Range of_a, const Block& b, Range of_b) {
  HS_CHECK(
      a.shape == b.shape,
      "layout.block: parts of tensors of different shapes have nothing in common: ",
      a.shape,
      " and ",
      b.shape
  );
  const std::size_t num_dims = a.ranges.size();
  std::vector<Range> common;
  for (std::size_t dim = 0; dim < num_dims; ++dim) {
    common.push_back(intersect(a.ranges[dim], b.ranges[dim]));
    if (common.back().numel() == 0) {
      return {};
    }
  }
  std::size_t num_outer = num_dims;
  std::int64_t row_numel = 1;
  while (num_outer > 0) {
    --num_outer;
    row_numel *= common[num_outer].numel();
    if (common[num_outer] != a.ranges[num_outer] || common[num_outer] != b.ranges[num_outer]) {
      break;
    }
  }
  Cursor in_a(a, common);
  Cursor in_b(b, common);
  std::vector<BlockRun> runs;
  std::vector<std::int64_t> index(num_outer, 0);
  while (true) {
    const std::int64_t skipped =
        std::max({std::int64_t{0}, of_a.begin - in_a.at, of_b.begin - in_b.at});
    const std::int64_t end = std::min({row_numel, of_a.end - in_a.at, of_b.end - in_b.at});
    if (end > skipped) {
      runs.push_back({in_a.at + skipped, in_b.at + skipped, end - skipped});
    }
    std::size_t dim = num_outer;
    while (dim > 0 && index[dim - 1] + 1 == common[dim - 1].numel()) {
      --dim;
      in_a.move(dim, -index[dim]);
      in_b.move(dim, -index[dim]);
      index[dim] = 0;
    }
    if (dim == 0) {
      return runs;
    }
    ++index[dim - 1];
    in_a.move(dim - 1, 1);
    in_b.move(dim - 1, 1);
  }
}

}  // namespace hypershard::layout
