// Why: see evaluate.h. Sums of losses are added up, means are not averaged.
#include "hypershard/train/evaluate.h"

#include <ATen/ops/zeros.h>

#include "hypershard/core/trace.h"
#include "hypershard/model/evaluation_scope.h"
#include "hypershard/model/gpt.h"

namespace hypershard::train {
namespace {

double bytes_a_token(const data::TokenFile& file) {
  return static_cast<double>(file.info().text_bytes) / static_cast<double>(file.num_tokens());
}

}  // namespace

Evaluation evaluate(const Session& session, const data::EvaluationDataset& text) {
  const TraceSpan span(TraceLane::kCompute, "evaluate");
  const model::EvaluationScope evaluation(session.model());
  const int rank = session.data_rank();
  const int size = session.num_data_ranks();
  at::Tensor sums = at::zeros({1}, at::kDouble);
  double& loss_sum = *sums.mutable_data_ptr<double>();
  const std::int64_t num_batches = text.num_batches(size);
  for (std::int64_t index = 0; index < num_batches; ++index) {
    const data::EvaluationBatch batch = text.batch(index, rank, size);
    // Every rank runs every forward, since a sharded one communicates; a batch may be all padding.
    const at::Tensor mean = session.model().loss(batch.input, batch.target);
    if (batch.num_targets > 0 && session.speaks_for_data_rank()) {
      loss_sum += mean.item<double>() * static_cast<double>(batch.num_targets);
    }
  }
  session.everyone().all_reduce(sums, comm::ReduceOp::kSum, "train.evaluate")->wait();
  Evaluation result;
  result.num_tokens = text.num_targets();
  result.loss = loss_sum / static_cast<double>(result.num_tokens);
  result.nats_a_byte = result.loss / bytes_a_token(text.file());
  return result;
}

}  // namespace hypershard::train
