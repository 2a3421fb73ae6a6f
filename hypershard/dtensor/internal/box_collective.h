// One collective between boxes: who holds which box before and after is fixed once, and with it
// counts and whether pieces can be read and written where they lie.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/comm/communicator.h"
#include "hypershard/dtensor/internal/box.h"
#include "hypershard/layout/placement.h"

namespace hypershard::dtensor::internal {

/// The boxes of all ranks of a communicator, by rank, before and after.
struct BoxExchange {
  std::shared_ptr<comm::Communicator> communicator;
  std::vector<Box> before;
  std::vector<Box> after;
};

/// Joins disjoint boxes into the one that every rank holds afterwards. Pieces that are runs of the
/// result are gathered into it without a copy.
class BoxGather {
 public:
  explicit BoxGather(BoxExchange exchange);
  /// Collective. `local` need not be contiguous; `is_owned`: nobody writes to it afterwards. The
  /// result is a new tensor.
  at::Tensor run(const at::Tensor& local, bool is_owned, const std::string& unit) const;

 private:
  BoxExchange exchange_;
  std::vector<std::int64_t> counts_;
  bool direct_;
};

/// Sends each rank the part of this rank's box that it holds afterwards.
class BoxAllToAll {
 public:
  explicit BoxAllToAll(BoxExchange exchange);
  /// Collective. `local` need not be contiguous; `is_owned`: nobody writes to it afterwards. The
  /// result is a new tensor.
  at::Tensor run(const at::Tensor& local, bool is_owned, const std::string& unit) const;

 private:
  at::Tensor packed(const at::Tensor& local) const;

  BoxExchange exchange_;
  std::vector<Box> sent_;
  std::vector<Box> received_;
  std::vector<std::int64_t> sent_counts_;
  std::vector<std::int64_t> received_counts_;
  bool reads_in_place_;
  bool writes_in_place_;
};

/// Reduces a box that all ranks hold and leaves each its part. Averages are divided by the number
/// of ranks after the sum.
class BoxReduceScatter {
 public:
  BoxReduceScatter(BoxExchange exchange, layout::Placement::Reduce reduce);
  /// Collective. `local` need not be contiguous; `is_owned`: nobody writes to it afterwards. The
  /// result is a new tensor.
  at::Tensor run(const at::Tensor& local, bool is_owned, const std::string& unit) const;

 private:
  BoxExchange exchange_;
  layout::Placement::Reduce reduce_;
  std::vector<std::int64_t> counts_;
  bool direct_;
};

/// Reduces `local` over all ranks. Writes into it if `is_owned` and it is contiguous, else into a
/// copy. Collective.
at::Tensor reduce_all(
    comm::Communicator& communicator,
    const at::Tensor& local,
    bool is_owned,
    layout::Placement::Reduce reduce,
    const std::string& unit
);

}  // namespace hypershard::dtensor::internal
