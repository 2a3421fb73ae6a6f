// From local tensors of any size to the standard cut: exchange of sizes, global shape, and one
// all-to-all where the pieces are not where a balanced cut has them.
#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "hypershard/comm/world.h"
#include "hypershard/core/error.h"
#include "hypershard/dtensor/dtensor.h"
#include "hypershard/dtensor/internal/box_collective.h"
#include "hypershard/dtensor/internal/local_map.h"
#include "hypershard/layout/sharding.h"

namespace hypershard::dtensor {
namespace {

using internal::Box;
using layout::Range;

/// What the ranks say about their local tensors.
struct LocalSizes {
  std::vector<std::vector<std::int64_t>> shapes;  ///< by rank
};

constexpr std::int64_t kMaxDims = 16;

/// Checks one rank's row against rank 0's; the same on all ranks, since all have all rows.
void check_row(std::span<const std::int64_t> row, std::span<const std::int64_t> first, int rank) {
  HS_CHECK(
      row[0] == first[0] && row[1] == first[1],
      "dtensor.from_local: rank ",
      rank,
      " has a tensor of ",
      row[0],
      " dimensions and dtype ",
      c10::toString(static_cast<at::ScalarType>(row[1])),
      ", rank 0 one of ",
      first[0],
      " and ",
      c10::toString(static_cast<at::ScalarType>(first[1])),
      " (expected equal ones on all ranks)"
  );
}

LocalSizes exchange_sizes(const at::Tensor& local, const comm::ProcessMesh& mesh) {
  HS_SUPPORTED(
      local.dim() <= kMaxDims,
      "dtensor.from_local: a tensor of ",
      local.dim(),
      " dimensions (at most ",
      kMaxDims,
      ")"
  );
  constexpr std::int64_t kRow = 2 + kMaxDims;
  std::vector<std::int64_t> own(kRow, 0);
  own[0] = local.dim();
  own[1] = static_cast<std::int64_t>(local.scalar_type());
  std::copy(local.sizes().begin(), local.sizes().end(), own.begin() + 2);
  const at::NoGradGuard no_grad;
  const at::Tensor input = at::empty({kRow}, at::kLong);
  std::copy(own.begin(), own.end(), input.mutable_data_ptr<std::int64_t>());
  const auto all = mesh.world().world_communicator();
  const at::Tensor table = at::empty({all->size(), kRow}, at::kLong);
  all->all_gather(table, input, {}, "from_local")->wait_released();
  LocalSizes sizes;
  const std::span<const std::int64_t> rows(
      table.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(table.numel())
  );
  for (int rank = 0; rank < all->size(); ++rank) {
    const auto row = rows.subspan(static_cast<std::size_t>(rank * kRow), kRow);
    check_row(row, rows.first(kRow), rank);
    const auto shape = row.subspan(2, static_cast<std::size_t>(row[0]));
    sizes.shapes.emplace_back(shape.begin(), shape.end());
  }
  return sizes;
}

/// Finds the ranges of one dimension on all ranks, from the sizes of the pieces in cut order.
class DimensionRanges {
 public:
  DimensionRanges(
      const LocalSizes& sizes, const layout::Layout& layout, const layout::DeviceMesh& mesh, int dim
  )
      : mesh_(mesh), axes_(layout.cut_axes(dim)), dim_(static_cast<std::size_t>(dim)) {
    std::size_t num_pieces = 1;
    for (const int axis : axes_) {
      num_pieces *= static_cast<std::size_t>(mesh.axes()[static_cast<std::size_t>(axis)].size);
    }
    pieces_.assign(num_pieces, {.begin = -1, .end = -1});
    holders_.assign(num_pieces, 0);
    for (int rank = 0; rank < mesh.size(); ++rank) {
      take(sizes.shapes[static_cast<std::size_t>(rank)][dim_], rank, layout);
    }
    std::int64_t begin = 0;
    for (Range& piece : pieces_) {
      piece = {.begin = begin, .end = begin + piece.end};
      begin = piece.end;
    }
  }

  std::int64_t size() const { return pieces_.back().end; }
  Range of(int rank) const { return pieces_[index(rank)]; }

 private:
  std::size_t index(int rank) const {
    const std::vector<int> coordinates = mesh_.coordinates(rank);
    int index = 0;
    for (const int axis : axes_) {
      const auto i = static_cast<std::size_t>(axis);
      index = index * mesh_.axes()[i].size + coordinates[i];
    }
    return static_cast<std::size_t>(index);
  }

  /// Until all ranks are seen, `end` is the piece's size.
  void take(std::int64_t size, int rank, const layout::Layout& layout) {
    const std::size_t i = index(rank);
    if (pieces_[i].end < 0) {
      pieces_[i].end = size;
      holders_[i] = rank;
    }
    HS_CHECK(
        pieces_[i].end == size,
        "dtensor.from_local: ranks ",
        holders_[i],
        " and ",
        rank,
        " hold the same part of dimension ",
        dim_,
        " under [",
        to_text(layout, mesh_),
        "] but have ",
        pieces_[i].end,
        " and ",
        size,
        " of it (expected equal sizes)",
        HS_HINT("only axes that are Shard(", dim_, ") may have pieces of different sizes")
    );
  }

  const layout::DeviceMesh& mesh_;
  std::vector<int> axes_;
  std::size_t dim_;
  std::vector<Range> pieces_;
  std::vector<int> holders_;  ///< first rank that has the piece
};

/// Moves pieces to other cuts of the same dimensions; its gradient moves them back.
class Rebalance : public internal::LocalMap {
 public:
  explicit Rebalance(internal::BoxExchange exchange)
      : exchange_(exchange), collective_(std::move(exchange)) {}
  at::Tensor run(const at::Tensor& local, bool is_owned) const override {
    return collective_.run(local, is_owned, "from_local");
  }

 protected:
  std::shared_ptr<const LocalMap> make_gradient() const override {
    return std::make_shared<Rebalance>(internal::BoxExchange{
        .communicator = exchange_.communicator,
        .before = exchange_.after,
        .after = exchange_.before,
    });
  }

 private:
  internal::BoxExchange exchange_;
  internal::BoxAllToAll collective_;
};

/// Who holds what, as the ranks have it and as a balanced cut has it.
struct Pieces {
  layout::TensorSpec spec;
  std::vector<Box> given;     ///< by rank
  std::vector<Box> standard;  ///< by rank
};

Pieces find_pieces(
    const LocalSizes& sizes, const layout::Layout& layout, const layout::DeviceMesh& mesh
) {
  Pieces pieces;
  pieces.spec.layout = layout;
  pieces.spec.shape = sizes.shapes.front();
  check_spec(pieces.spec, mesh);
  pieces.given.resize(sizes.shapes.size());
  for (std::size_t dim = 0; dim < pieces.spec.shape.size(); ++dim) {
    const DimensionRanges ranges(sizes, layout, mesh, static_cast<int>(dim));
    pieces.spec.shape[dim] = ranges.size();
    for (std::size_t rank = 0; rank < pieces.given.size(); ++rank) {
      pieces.given[rank].push_back(ranges.of(static_cast<int>(rank)));
    }
  }
  for (int rank = 0; rank < mesh.size(); ++rank) {
    pieces.standard.push_back(layout::local_ranges(pieces.spec, mesh, mesh.coordinates(rank)));
  }
  return pieces;
}

at::Tensor rebalanced(
    const at::Tensor& local, const Pieces& pieces, const comm::ProcessMesh& mesh
) {
  std::vector<std::string> names;
  for (std::size_t axis = 0; axis < mesh.mesh().axes().size(); ++axis) {
    if (pieces.spec.layout.placements[axis].kind == layout::Placement::Kind::kShard) {
      names.push_back(mesh.mesh().axes()[axis].name);
    }
  }
  internal::BoxExchange exchange{.communicator = mesh.axes(names), .before = {}, .after = {}};
  for (const int rank : exchange.communicator->info().global_ranks) {
    exchange.before.push_back(pieces.given[static_cast<std::size_t>(rank)]);
    exchange.after.push_back(pieces.standard[static_cast<std::size_t>(rank)]);
  }
  return internal::apply_map(std::make_shared<Rebalance>(std::move(exchange)), local);
}

}  // namespace

DTensor from_local(
    const at::Tensor& local,
    const layout::Layout& layout,
    const std::shared_ptr<const comm::ProcessMesh>& mesh,
    const std::optional<std::vector<std::int64_t>>& shape
) {
  HS_CHECK(mesh != nullptr, "dtensor.from_local: the process mesh is null");
  HS_CHECK(local.defined(), "dtensor.from_local: the local tensor is undefined");
  if (shape.has_value()) {
    return DTensor(local, {.shape = *shape, .layout = layout}, mesh);
  }
  const Pieces pieces = find_pieces(exchange_sizes(local, *mesh), layout, mesh->mesh());
  const bool is_standard = pieces.given == pieces.standard;
  return DTensor(is_standard ? local : rebalanced(local, pieces, *mesh), pieces.spec, mesh);
}

}  // namespace hypershard::dtensor
