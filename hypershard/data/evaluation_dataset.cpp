// Why: cutting a held-out file into windows whose last one may be short.
// Rows past the end cost a forward but no correctness: none of their targets counts.
#include "hypershard/data/evaluation_dataset.h"

#include <algorithm>
#include <span>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include "hypershard/core/error.h"

namespace hypershard::data {

EvaluationDataset::EvaluationDataset(const std::string& path, const EvaluationOptions& options)
    : file_(path, AccessPattern::kSequential), options_(options) {
  HS_CHECK_GE(options.sequence_length, 1, "data: evaluation sequence_length must be positive");
  HS_CHECK_GE(options.rows_per_rank, 1, "data: evaluation rows_per_rank must be positive");
  HS_CHECK_GE(options.max_tokens, 0, "data: evaluation max_tokens must not be negative");
  HS_CHECK(
      file_.num_tokens() >= 2,
      "data: ",
      path,
      ": too few tokens to evaluate on: ",
      file_.num_tokens(),
      " (needed: at least 2)",
      HS_HINT("hold out more documents")
  );
  num_targets_ = static_cast<std::int64_t>(file_.num_tokens() - 1);
  if (options.max_tokens > 0) {
    num_targets_ = std::min(num_targets_, options.max_tokens);
  }
}

std::int64_t EvaluationDataset::num_batches(std::int64_t world_size) const {
  HS_CHECK_GE(world_size, 1, "data: evaluation world_size must be positive");
  const std::int64_t targets_per_batch =
      options_.sequence_length * options_.rows_per_rank * world_size;
  return (num_targets_ + targets_per_batch - 1) / targets_per_batch;
}

EvaluationBatch EvaluationDataset::batch(
    std::int64_t index, std::int64_t rank, std::int64_t world_size
) const {
  const std::int64_t count = num_batches(world_size);
  HS_CHECK(
      index >= 0 && index < count,
      "data: evaluation batch ",
      index,
      " (expected 0 to ",
      count - 1,
      ")"
  );
  HS_CHECK(
      rank >= 0 && rank < world_size, "data: rank ", rank, " (expected 0 to ", world_size - 1, ")"
  );
  const std::int64_t length = options_.sequence_length;
  const std::int64_t rows = options_.rows_per_rank;
  EvaluationBatch batch{
      .input = at::zeros({rows, length}, at::kLong),
      .target = at::full({rows, length}, kIgnoredTarget, at::kLong)
  };
  auto* input = batch.input.mutable_data_ptr<std::int64_t>();
  auto* target = batch.target.mutable_data_ptr<std::int64_t>();
  const std::int64_t first_row = (index * world_size + rank) * rows;
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t begin = (first_row + row) * length;
    const std::int64_t num_counted = std::clamp<std::int64_t>(num_targets_ - begin, 0, length);
    if (num_counted == 0) {
      break;
    }
    const auto offset = static_cast<std::uint64_t>(begin);
    const auto size = static_cast<std::size_t>(num_counted);
    file_.read(offset, std::span(input + row * length, size));
    file_.read(offset + 1, std::span(target + row * length, size));
    batch.num_targets += num_counted;
  }
  return batch;
}

}  // namespace hypershard::data
