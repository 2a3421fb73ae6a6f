// Why: which tokens a step trains on must depend on the seed and the step alone, never on how many
// ranks share the work or on where a run was interrupted.
#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

#include "hypershard/data/token_file.h"

namespace hypershard::data {

/// What one rank feeds the model: `target[b][t]` is the token that follows `input[b][t]`.
struct Batch {
  at::Tensor input;   ///< [B, T] int64
  at::Tensor target;  ///< [B, T] int64
};

/// How a token file is cut into batches.
struct DatasetOptions {
  std::int64_t sequence_length = 256;  ///< T, in tokens
  std::int64_t global_batch = 16;      ///< rows of one step, over all ranks and micro-batches
  std::int64_t accumulation = 1;       ///< micro-batches of one step
  std::uint64_t seed = 0;
  bool shuffle = true;  ///< false: windows in the order of the file, always from its start
};

/// Training batches from a token file.
///
/// NOTE [global rows]
/// The rows of all steps form one endless sequence: row g of step s is sample s * global_batch + g.
/// Sample i belongs to epoch i / num_windows() and is the window at place i % num_windows() of that
/// epoch's own permutation. Windows of T + 1 tokens lie end to end (one token shared), beginning at
/// an offset below T that is drawn anew for every epoch, so that no two epochs cut the text alike.
/// Micro-batch m of A takes the rows [m, m + 1) * global_batch / A, and rank r of W a contiguous
/// part of those. Batches are pure functions of their arguments: a resumed run needs only its step.
///
/// Threads: const functions may be called from any thread.
class TokenDataset {
 public:
  /// Opens the token file `path`.
  /// Errors: IoError as TokenFile; InvalidArgument if the file holds fewer than T + 1 tokens or an
  ///         option is not positive.
  TokenDataset(const std::string& path, const DatasetOptions& options);

  /// Returns the rows that `rank` trains on in one micro-batch of one step.
  ///
  /// Shapes: input and target [global_batch / (accumulation * world_size), T].
  /// Memory: allocates both tensors on the CPU.
  /// Errors: InvalidArgument if global_batch does not divide evenly or an argument is out of range;
  ///         IoError for a damaged file.
  Batch batch(
      std::int64_t step, std::int64_t micro_batch, std::int64_t rank, std::int64_t world_size
  ) const;
  /// Asks the kernel to bring that batch's tokens into memory; returns at once.
  void will_need(
      std::int64_t step, std::int64_t micro_batch, std::int64_t rank, std::int64_t world_size
  ) const;

  /// Returns how many rows a rank gets in a micro-batch.
  /// Errors: InvalidArgument if global_batch cannot be cut that way, naming values that can.
  std::int64_t rows_per_rank(std::int64_t world_size) const;
  /// Returns where sample `index` of the endless sequence begins in the file.
  std::uint64_t sample_begin(std::int64_t index) const;
  /// Returns the number of windows of one epoch.
  std::int64_t num_windows() const { return num_windows_; }
  /// Returns how often the data has been gone through before `step`.
  double epochs_before(std::int64_t step) const;

  const TokenFile& file() const { return file_; }
  const DatasetOptions& options() const { return options_; }

 private:
  std::int64_t first_sample(
      std::int64_t step, std::int64_t micro_batch, std::int64_t rank, std::int64_t world_size
  ) const;
  std::uint64_t phase(std::int64_t epoch) const;

  TokenFile file_;
  DatasetOptions options_;
  std::int64_t num_windows_ = 0;
};

}  // namespace hypershard::data
