// Why: what a step cost is a sum over ranks of counters from several places; the loop should not
// know where each is kept.
#pragma once

#include <array>
#include <cstdint>

#include "hypershard/train/comm_meter.h"
#include "hypershard/train/metrics.h"
#include "hypershard/train/session.h"
#include "hypershard/train/step.h"

namespace hypershard::train {

/// Measures one step after another.
///
/// Life cycle: per step begin(), the step, measure(). The session must outlive it.
class StepMeter {
 public:
  explicit StepMeter(const Session& session);

  /// Sets back what is counted by step.
  void begin();
  /// Adds up over all ranks what the step since begin() cost. `step` counts steps done. Memory of
  /// the job is measured only if asked for: it takes milliseconds. Collective: all ranks of the
  /// session. Errors: CommError.
  StepMetrics measure(
      std::int64_t step, const StepResult& result, double step_s, bool with_job_memory
  );
  /// Measured speed of matrix products of one rank, from which the share that was used follows; 0:
  /// not known.
  void set_gemm_peak(double flops_per_s) { gemm_peak_flops_per_s_ = flops_per_s; }
  /// Returns the most that the job's memory was. Units: bytes; 0: never measured.
  std::int64_t job_bytes() const { return job_bytes_; }

 private:
  const Session& session_;
  CommMeter comm_;
  std::array<comm::CommStats, 2> before_;  ///< by tier: inside supernodes, and between them
  double gemm_peak_flops_per_s_ = 0;
  std::int64_t job_bytes_ = 0;
};

}  // namespace hypershard::train
