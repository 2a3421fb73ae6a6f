// Why: see gemm_peak.h.
#include "hypershard/train/gemm_peak.h"

#include <algorithm>
#include <limits>

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "hypershard/core/clock.h"
#include "hypershard/nn/linear.h"
#include "hypershard/train/session.h"

namespace hypershard::train {

GemmPeak measure_gemm_peak(
    comm::Communicator& ranks, const GemmShape& shape, at::ScalarType dtype, double seconds
) {
  const c10::NoGradGuard no_grad;
  const at::Tensor left = at::ones({shape.rows, shape.inner}, dtype);
  const at::Tensor right = at::ones({shape.columns, shape.inner}, dtype);
  nn::linear(
      left, right
  );  // the layers' own product; the first call sets up threads and packs kernels
  ranks.barrier("train.gemm_peak")->wait();
  double best_s = std::numeric_limits<double>::infinity();
  const Stopwatch whole;
  do {
    const Stopwatch one;
    nn::linear(left, right);
    best_s = std::min(best_s, one.elapsed_s());
  } while (whole.elapsed_s() < seconds);
  const double flops = 2.0 * static_cast<double>(shape.rows) * static_cast<double>(shape.inner) *
                       static_cast<double>(shape.columns);
  at::Tensor sum = at::zeros({1}, at::kDouble);
  *sum.mutable_data_ptr<double>() = flops / best_s;
  ranks.all_reduce(sum, comm::ReduceOp::kSum, "train.gemm_peak")->wait();
  return {.flops_per_s = *sum.const_data_ptr<double>(), .shape = shape, .dtype = dtype_word(dtype)};
}

}  // namespace hypershard::train
