// Buckets: consecutive units whose reductions cross a slow link together, and cuts that give every
// rank of the link the same share of a bucket where no single unit can.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "hypershard/layout/packing.h"

namespace hypershard::layout {

/// Consecutive units, `[begin, end)` in declaration order.
struct Bucket {
  int begin = 0;
  int end = 0;
  std::int64_t bytes = 0;  ///< of all its units
  int num_units() const { return end - begin; }
  bool operator==(const Bucket&) const = default;
};

/// Target sizes that mean one unit a bucket, and all units in one.
inline constexpr std::int64_t kBucketOfOne = 0;
inline constexpr std::int64_t kBucketOfAll = std::numeric_limits<std::int64_t>::max();

/// Returns the smallest number of bytes whose reduce-scatter over a link spends no more than
/// `latency_share` of its time on latency.
///
/// Of n bytes that each rank holds, n (num_ranks - 1) / num_ranks cross the link from each rank. An
/// infinite bandwidth hides no latency: kBucketOfAll; without latency kBucketOfOne is enough.
/// Errors: InvalidArgument if the share is not in (0, 1), a rank count < 1, a latency < 0 or a
/// bandwidth <= 0.
std::int64_t smallest_bucket_bytes(
    double latency_s, double bytes_per_s, int num_ranks, double latency_share
);

/// Groups units into buckets of at least `target_bytes`, in the order in which backward completes
/// them: the last unit first.
///
/// A bucket is full with the unit that takes it to its target; what is left for the first units,
/// whose reduction nothing can hide, may be less. Units of 0 bytes join a neighbour.
/// Shapes: `unit_bytes[i]` is what of unit i a rank of the link holds before it is scattered there,
/// in the wire dtype: the unit's slice after the reduction inside the supernode.
/// Errors: InvalidArgument for a negative size.
std::vector<Bucket> make_buckets(
    std::span<const std::int64_t> unit_bytes, std::int64_t target_bytes
);

/// One group of a bucket: its packing, and what an element weighs on the link.
struct BucketGroup {
  GroupPacking* packing = nullptr;
  std::int64_t element_bytes = 4;
};

/// Moves the cuts of one level so that the groups of a bucket together load all ranks alike.
///
/// Each group is cut as evenly as its atoms allow around what the groups before it left uneven;
/// those of the largest atoms come first, so that the smallest even out the rest. Cuts of outer
/// levels stay, those of inner levels are made anew, near the even ones. Within every outer piece
/// the largest load exceeds the mean by no more than the largest atom of the groups, and by no more
/// than the smallest where those have enough to give. Even cuts that load all ranks alike stay.
/// Equal groups give equal cuts on every rank.
/// Errors: InvalidArgument if the groups' cut sizes differ or have no such level.
void balance_cuts(std::span<const BucketGroup> groups, int level);

}  // namespace hypershard::layout
