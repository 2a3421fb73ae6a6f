// Why: see step_meter.h. One sum over all ranks, and one maximum.
#include "hypershard/train/step_meter.h"

#include <algorithm>
#include <iterator>

#include <ATen/ops/zeros.h>

#include "hypershard/model/gpt.h"
#include "hypershard/train/process_memory.h"

namespace hypershard::train {

StepMeter::StepMeter(const Session& session)
    : session_(session), comm_(session.sharded(), session.mesh(), session.everyone()) {}

void StepMeter::begin() {
  session_.sharded().reset_counters();
  exposed_before_ns_ = comm_.exposed_ns();
  between_before_ = comm_.stats(layout::Tier::kInter);
}

StepMetrics StepMeter::measure(
    std::int64_t step, const StepResult& result, double step_s, bool with_job_memory
) {
  const shard::Counters& counters = session_.sharded().counters();
  // The communicators' waits hold those of the write window, which are the gather group's.
  const auto exposed = static_cast<double>(comm_.exposed_ns() - exposed_before_ns_);
  const comm::CommStats between = comm_.stats(layout::Tier::kInter);
  at::Tensor sums = at::zeros({11}, at::kDouble);
  double* sum = sums.mutable_data_ptr<double>();
  const std::int64_t own[] = {
      counters.copied_bytes,
      counters.accumulated_bytes,
      counters.gathered_bytes,
      counters.reduced_bytes,
      counters.published_bytes
  };
  std::transform(std::begin(own), std::end(own), sum, [](std::int64_t value) {
    return static_cast<double>(value);
  });
  sum[5] = exposed;
  sum[6] = step_s;
  sum[7] = with_job_memory ? static_cast<double>(proportional_bytes()) : 0;
  sum[8] = static_cast<double>(
      between.wait_ns + between.reduce_ns - between_before_.wait_ns - between_before_.reduce_ns
  );
  sum[9] = static_cast<double>(between.sent_bytes - between_before_.sent_bytes);
  sum[10] = static_cast<double>(between.busy_ns - between_before_.busy_ns);
  at::Tensor largest = at::zeros({1}, at::kDouble);
  *largest.mutable_data_ptr<double>() = static_cast<double>(peak_resident_bytes());
  comm::Communicator& everyone = session_.everyone();
  const comm::WorkPtr summing = everyone.all_reduce(sums, comm::ReduceOp::kSum, "train.report");
  everyone.all_reduce(largest, comm::ReduceOp::kMax, "train.report")->wait();
  summing->wait();

  StepMetrics metrics;
  metrics.step = step;
  metrics.loss = result.loss;
  metrics.lr = result.lr;
  metrics.grad_norm = result.grad_norm;
  const double mean_s = sum[6] / everyone.size();
  metrics.step_ms = mean_s * 1000;
  metrics.tokens_per_s = static_cast<double>(session_.tokens_per_step()) / mean_s;
  if (gemm_peak_flops_per_s_ > 0) {
    const double flops = model::flops_per_token(session_.shape(), session_.config().model.sequence);
    metrics.mfu = flops * metrics.tokens_per_s / gemm_peak_flops_per_s_;
  }
  metrics.exposed_comm_share = sum[5] * 1e-9 / sum[6];
  metrics.exposed_between_share = sum[8] * 1e-9 / sum[6];
  metrics.between_bytes = static_cast<std::int64_t>(sum[9]);
  if (sum[10] > 0) {
    metrics.between_bytes_per_s = sum[9] * 1e9 / sum[10];
    metrics.between_overlap = std::max(0.0, 1 - sum[8] / sum[10]);
  }
  metrics.peak_bytes = static_cast<std::int64_t>(*largest.const_data_ptr<double>());
  if (with_job_memory) {
    metrics.job_bytes = static_cast<std::int64_t>(sum[7]);
    job_bytes_ = std::max(job_bytes_, *metrics.job_bytes);
  }
  metrics.tokens_seen = step * session_.tokens_per_step();
  metrics.copied_bytes = static_cast<std::int64_t>(sum[0]);
  metrics.accumulated_bytes = static_cast<std::int64_t>(sum[1]);
  metrics.gathered_bytes = static_cast<std::int64_t>(sum[2]);
  metrics.reduced_bytes = static_cast<std::int64_t>(sum[3]);
  metrics.published_bytes = static_cast<std::int64_t>(sum[4]);
  return metrics;
}

}  // namespace hypershard::train
