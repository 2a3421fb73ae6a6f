// Why: every back end sees only calls that fit; what fits is one set of rules, whose messages name
// the call and the values. Internal to the module.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "hypershard/comm/communicator.h"

namespace hypershard::comm::internal {

/// Names the call in messages: `comm: all_gather of unit 'blocks.3' on 'shard'`.
struct Subject {
  Op op;
  std::string_view unit;
  const GroupInfo& info;
  int segment = -1;  ///< of several
};
std::string to_text(const Subject& subject);

/// Checks that a tensor is defined and contiguous.
void check_tensor(const Subject& subject, std::string_view name, const at::Tensor& tensor);

/// Checks that output and input have one dtype and device.
void check_same(const Subject& subject, const at::Tensor& output, const at::Tensor& input);

/// Checks that values of `dtype` can be joined.
void check_reducible(const Subject& subject, at::ScalarType dtype);
void check_divisor(const Subject& subject, double divisor);

/// Checks that values of `dtype` can travel as `reduction` says, and drops what says nothing.
void check_wire(const Subject& subject, at::ScalarType dtype, Reduction& reduction);

/// Returns `tensor` as one row, outside autograd.
at::Tensor flat(const at::Tensor& tensor);

/// Returns full counts whose sum is `numel`; {} means even.
std::vector<std::int64_t> full_counts(
    const Subject& subject,
    std::string_view name,
    std::span<const std::int64_t> counts,
    std::int64_t numel,
    std::string_view whole
);

/// Tells whether two tensors have a byte in common.
bool overlap(const at::Tensor& a, const at::Tensor& b);

/// Checks that `part` lies apart from `whole`, or is the very slice of it that this rank has by
/// `counts`.
void check_overlap(
    const Subject& subject,
    std::string_view part_name,
    const at::Tensor& part,
    std::string_view whole_name,
    const at::Tensor& whole,
    std::span<const std::int64_t> counts
);

/// Returns a reduce-scatter's tensors flat and with full counts, after checking that they fit.
ReduceSegment checked_segment(
    const Subject& subject,
    const at::Tensor& output,
    const at::Tensor& input,
    std::span<const std::int64_t> counts
);

/// Checks that a segment has the dtypes and the device of the first.
void check_same_dtypes(
    const Subject& subject, const ReduceSegment& first, const ReduceSegment& segment
);

/// Checks that no segment's memory overlaps another's.
void check_segments_apart(const Subject& subject, const std::vector<ReduceSegment>& segments);

}  // namespace hypershard::comm::internal
