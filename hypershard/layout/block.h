// A rectangular part of a tensor and the order of its elements: what a rank holds of a parameter
// that is cut along dimensions, as checkpoints, initial values and gathers must address it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "hypershard/layout/packing.h"
#include "hypershard/layout/sharding.h"

namespace hypershard::layout {

/// A part of a tensor: one range a dimension. Its own elements count row-major from its first.
struct Block {
  std::vector<std::int64_t> shape;  ///< of the whole tensor; {} is a scalar
  std::vector<Range> ranges;        ///< of each dimension

  std::vector<std::int64_t> local_shape() const;
  std::int64_t numel() const;
  bool is_whole() const;
  bool operator==(const Block&) const = default;
};
/// Prints the ranges like `[0:8,4:8]`.
std::string to_text(const Block& block);

/// Returns the block that is the whole tensor.
Block whole_block(std::vector<std::int64_t> shape);
/// Returns what the rank at `coordinates` holds. Precondition: check_spec has passed.
Block local_block(const TensorSpec& spec, const DeviceMesh& mesh, std::span<const int> coordinates);

/// Elements that lie side by side in two blocks of one tensor. Units: elements.
struct BlockRun {
  std::int64_t first = 0;   ///< index in the one block's row-major order
  std::int64_t second = 0;  ///< in the other's
  std::int64_t numel = 0;
  bool operator==(const BlockRun&) const = default;
};

/// Lists the elements that range `of_a` of block `a` and range `of_b` of block `b` have in common,
/// in the order of the tensor. With `b` the whole tensor, `second` is the global index.
/// Errors: InvalidArgument if the blocks are of tensors of different shapes.
std::vector<BlockRun> common_runs(const Block& a, Range of_a, const Block& b, Range of_b);

}  // namespace hypershard::layout
