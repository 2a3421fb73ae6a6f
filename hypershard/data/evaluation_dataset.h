// Why: an evaluation's mean must be exact and the same for any number of ranks, and yet every rank
// must run the same number of forwards, since a sharded forward communicates.
#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

#include "hypershard/data/token_file.h"

namespace hypershard::data {

/// The target of a position that does not count; `cross_entropy` ignores it by default.
inline constexpr std::int64_t kIgnoredTarget = -100;

/// One rank's part of one evaluation batch.
struct EvaluationBatch {
  at::Tensor input;              ///< [B, T] int64
  at::Tensor target;             ///< [B, T] int64; kIgnoredTarget where nothing counts
  std::int64_t num_targets = 0;  ///< positions that count, maybe 0
};

/// How a held-out file is read.
struct EvaluationOptions {
  std::int64_t sequence_length = 256;  ///< T, in tokens
  std::int64_t rows_per_rank = 16;     ///< B
  std::int64_t max_tokens = 0;         ///< evaluate at most so many targets; 0: all
};

/// Evaluation batches from a token file: windows in order, each token a target once.
///
/// Every token but the first is a target, in windows of T that do not overlap. Row g of all rows is
/// window g; batch b holds the rows [b, b + 1) * B * W, and rank r of W a contiguous part of those.
/// What is missing to a whole batch is filled with ignored targets, so that all ranks get equally
/// many batches of equal shape. The exact mean over the file is the sum of losses over all ranks
/// and batches, divided by num_targets(): sum losses, do not average means. Threads: const
/// functions may be called from any thread.
class EvaluationDataset {
 public:
  /// Opens the token file `path`.
  /// Errors: IoError as TokenFile; InvalidArgument for fewer than 2 tokens or a wrong option.
  EvaluationDataset(const std::string& path, const EvaluationOptions& options);

  /// Returns the number of batches, the same on every rank.
  std::int64_t num_batches(std::int64_t world_size) const;
  /// Returns a rank's part of a batch.
  /// Errors: InvalidArgument if an argument is out of range; IoError for a damaged file.
  EvaluationBatch batch(std::int64_t index, std::int64_t rank, std::int64_t world_size) const;
  /// Returns how many tokens are predicted in all.
  std::int64_t num_targets() const { return num_targets_; }

  const TokenFile& file() const { return file_; }
  const EvaluationOptions& options() const { return options_; }

 private:
  TokenFile file_;
  EvaluationOptions options_;
  std::int64_t num_targets_ = 0;
};

}  // namespace hypershard::data
