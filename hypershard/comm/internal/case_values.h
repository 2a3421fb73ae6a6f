// Why: what collectives are run on and must give, shared by the files of cases. Test support; not
// installed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hypershard/comm/communicator.h"

namespace hypershard::comm::testing_cases {

using Counts = std::vector<std::int64_t>;

/// Returns what rank `rank` puts in.
at::Tensor filled(std::int64_t numel, int rank, at::ScalarType dtype);
/// Fills with something that no case expects.
at::Tensor garbage(std::int64_t numel, at::ScalarType dtype);
/// Returns the joined values of all ranks at `[begin, begin + numel)`.
at::Tensor joined(int size, std::int64_t begin, std::int64_t numel, ReduceOp op);

/// Throws InternalError at the first element that differs.
void expect_equal(
    const Communicator& communicator,
    const std::string& what,
    const at::Tensor& got,
    const at::Tensor& expected
);

std::int64_t total(const Counts& counts);
std::int64_t begin_of(const Counts& counts, int rank);
std::size_t index(int rank);
/// Returns even, uneven, partly empty and empty counts.
std::vector<Counts> count_cases(int size);

}  // namespace hypershard::comm::testing_cases
