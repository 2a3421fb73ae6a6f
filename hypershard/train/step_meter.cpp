// Why: see step_meter.h. One sum over all ranks, and one maximum.
#include "hypershard/train/step_meter.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <optional>

#include <ATen/ops/zeros.h>

#include "hypershard/model/gpt.h"
#include "hypershard/train/process_memory.h"

namespace hypershard::train {
namespace {

constexpr std::array kTiers = {layout::Tier::kIntra, layout::Tier::kInter};

// Where in the sums over all ranks what lies; the counters come first.
constexpr std::size_t kStepS = 5;
constexpr std::size_t kJobBytes = 6;
constexpr std::size_t kTierSums = 7;
constexpr std::int64_t kNumSums = 13;

// What one tier cost in a step, summed over all ranks.
struct TierCost {
  double exposed_ns = 0;
  double sent_bytes = 0;
  double busy_ns = 0;

  std::optional<double> bytes_per_s() const {
    return busy_ns > 0 ? std::optional(sent_bytes * 1e9 / busy_ns) : std::nullopt;
  }
  std::optional<double> overlap() const {
    return busy_ns > 0 ? std::optional(std::max(0.0, 1 - exposed_ns / busy_ns)) : std::nullopt;
  }
};

TierCost cost_of(const double* sums, std::size_t tier) {
  const double* own = sums + kTierSums + 3 * tier;
  return {.exposed_ns = own[0], .sent_bytes = own[1], .busy_ns = own[2]};
}

void fill_tiers(StepMetrics& metrics, const double* sums) {
  const TierCost inside = cost_of(sums, 0);
  const TierCost between = cost_of(sums, 1);
  const double step_ns = sums[kStepS] * 1e9;
  metrics.exposed_inside_share = inside.exposed_ns / step_ns;
  metrics.exposed_between_share = between.exposed_ns / step_ns;
  metrics.exposed_comm_share = (inside.exposed_ns + between.exposed_ns) / step_ns;
  metrics.inside_bytes = static_cast<std::int64_t>(inside.sent_bytes);
  metrics.inside_bytes_per_s = inside.bytes_per_s();
  metrics.inside_overlap = inside.overlap();
  metrics.between_bytes = static_cast<std::int64_t>(between.sent_bytes);
  metrics.between_bytes_per_s = between.bytes_per_s();
  metrics.between_overlap = between.overlap();
}

}  // namespace

StepMeter::StepMeter(const Session& session)
    : session_(session), comm_(session.sharded(), session.mesh(), session.everyone()) {}

void StepMeter::begin() {
  session_.sharded().reset_counters();
  for (std::size_t tier = 0; tier < kTiers.size(); ++tier) {
    before_[tier] = comm_.stats(kTiers[tier]);
  }
}

StepMetrics StepMeter::measure(
    std::int64_t step, const StepResult& result, double step_s, bool with_job_memory
) {
  const shard::Counters& counters = session_.sharded().counters();
  at::Tensor sums = at::zeros({kNumSums}, at::kDouble);
  double* sum = sums.mutable_data_ptr<double>();
  const std::int64_t own[] = {
      counters.copied_bytes,
      counters.accumulated_bytes,
      counters.gathered_bytes,
      counters.reduced_bytes,
      counters.published_bytes
  };
  const auto as_double = [](std::int64_t value) { return static_cast<double>(value); };
  std::transform(std::begin(own), std::end(own), sum, as_double);
  sum[kStepS] = step_s;
  sum[kJobBytes] = with_job_memory ? as_double(proportional_bytes()) : 0;
  for (std::size_t tier = 0; tier < kTiers.size(); ++tier) {
    // The communicators' waits hold those of the write window, which are the gather group's.
    const comm::CommStats& before = before_[tier];
    const comm::CommStats after = comm_.stats(kTiers[tier]);
    double* cost = sum + kTierSums + 3 * tier;
    cost[0] = as_double(after.wait_ns + after.reduce_ns - before.wait_ns - before.reduce_ns);
    cost[1] = as_double(after.sent_bytes - before.sent_bytes);
    cost[2] = as_double(after.busy_ns - before.busy_ns);
  }
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
  const double mean_s = sum[kStepS] / everyone.size();
  metrics.step_ms = mean_s * 1000;
  metrics.tokens_per_s = static_cast<double>(session_.tokens_per_step()) / mean_s;
  if (gemm_peak_flops_per_s_ > 0) {
    const double flops = model::flops_per_token(session_.shape(), session_.config().model.sequence);
    metrics.mfu = flops * metrics.tokens_per_s / gemm_peak_flops_per_s_;
  }
  fill_tiers(metrics, sum);
  metrics.peak_bytes = static_cast<std::int64_t>(*largest.const_data_ptr<double>());
  if (with_job_memory) {
    metrics.job_bytes = static_cast<std::int64_t>(sum[kJobBytes]);
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
