// Why: "model FLOPs utilisation" needs a peak, and a vendor's number says nothing on a shared or
// throttled machine. So the peak is what a matrix product of the model's own size reaches here.
#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

#include "hypershard/comm/communicator.h"

namespace hypershard::train {

/// A matrix product [rows, inner] x [inner, columns].
struct GemmShape {
  std::int64_t rows = 0;
  std::int64_t inner = 0;
  std::int64_t columns = 0;
};

/// What was measured.
struct GemmPeak {
  double flops_per_s = 0;  ///< of all ranks together, measured while all of them work
  GemmShape shape = {};
  std::string dtype = {};  ///< as a configuration writes it
};

/// Measures at::mm of one shape on all ranks at once, for about `seconds`; the fastest run counts.
///
/// Collective: all ranks of `ranks`.
/// Errors: CommError.
GemmPeak measure_gemm_peak(
    comm::Communicator& ranks, const GemmShape& shape, at::ScalarType dtype, double seconds = 0.3
);

}  // namespace hypershard::train
