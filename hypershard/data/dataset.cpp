// Why: the arithmetic from (step, micro-batch, rank) to places in the token file.
// See NOTE [global rows] in dataset.h.
#include "hypershard/data/dataset.h"

#include <algorithm>
#include <limits>
#include <span>

#include <ATen/ops/empty.h>

#include "hypershard/core/error.h"
#include "hypershard/core/hash.h"
#include "hypershard/core/random.h"

namespace hypershard::data {
namespace {

std::uint64_t order_stream(std::int64_t epoch) {
  return hash_combine(stream_of("data/order"), static_cast<std::uint64_t>(epoch));
}

// Throws unless the step's rows can be dealt out, and says which numbers of rows can.
void check_divides(const DatasetOptions& options, std::int64_t world_size) {
  HS_CHECK_GE(world_size, 1, "data: world_size must be positive");
  const std::int64_t parts = options.accumulation * world_size;
  const std::int64_t below = options.global_batch / parts * parts;
  HS_CHECK(
      options.global_batch % parts == 0,
      "data: global_batch ",
      options.global_batch,
      " cannot be dealt out to ",
      world_size,
      " ranks in ",
      options.accumulation,
      " micro-batches (expected a multiple of ",
      parts,
      ")",
      HS_HINT(
          "set global_batch to ",
          below > 0 ? concat_text(below, " or ") : std::string(),
          below + parts,
          ", or use fewer ranks"
      )
  );
}

}  // namespace

TokenDataset::TokenDataset(const std::string& path, const DatasetOptions& options)
    : file_(path, AccessPattern::kRandom), options_(options) {
  HS_CHECK_GE(options.sequence_length, 1, "data: sequence_length must be positive");
  HS_CHECK_GE(options.global_batch, 1, "data: global_batch must be positive");
  HS_CHECK_GE(options.accumulation, 1, "data: accumulation must be positive");
  const auto num_tokens = static_cast<std::int64_t>(file_.num_tokens());
  const std::int64_t length = options.sequence_length;
  HS_CHECK(
      length < std::numeric_limits<std::int64_t>::max() / 2 && num_tokens >= length + 1,
      "data: ",
      path,
      ": too few tokens: ",
      num_tokens,
      " (needed: at least ",
      length,
      " + 1 for one sequence and its last target)",
      HS_HINT("prepare more text, or set sequence_length to at most ", num_tokens - 1)
  );
  // One window less than fit, so that every phase below `length` leaves room for all of them.
  num_windows_ = options.shuffle ? std::max<std::int64_t>(1, num_tokens / length - 1)
                                 : (num_tokens - 1) / length;
}

std::int64_t TokenDataset::rows_per_rank(std::int64_t world_size) const {
  check_divides(options_, world_size);
  return options_.global_batch / (options_.accumulation * world_size);
}

std::uint64_t TokenDataset::phase(std::int64_t epoch) const {
  const auto num_tokens = static_cast<std::int64_t>(file_.num_tokens());
  const std::int64_t room = num_tokens - (num_windows_ * options_.sequence_length + 1);
  const std::int64_t num_phases = std::min(options_.sequence_length, room + 1);
  return index_below(
      static_cast<std::uint64_t>(num_phases),
      options_.seed,
      stream_of("data/phase"),
      static_cast<std::uint64_t>(epoch)
  );
}

std::uint64_t TokenDataset::sample_begin(std::int64_t index) const {
  HS_CHECK_GE(index, 0, "data: a sample's index must not be negative");
  const std::int64_t epoch = index / num_windows_;
  const auto place = static_cast<std::uint64_t>(index % num_windows_);
  const auto length = static_cast<std::uint64_t>(options_.sequence_length);
  if (!options_.shuffle) {
    return place * length;
  }
  const PermutedIndex permuted(
      static_cast<std::uint64_t>(num_windows_), options_.seed, order_stream(epoch)
  );
  return phase(epoch) + permuted(place) * length;
}

std::int64_t TokenDataset::first_sample(
    std::int64_t step, std::int64_t micro_batch, std::int64_t rank, std::int64_t world_size
) const {
  const std::int64_t rows = rows_per_rank(world_size);
  const std::int64_t max_step =
      std::numeric_limits<std::int64_t>::max() / options_.global_batch - 1;
  HS_CHECK(step >= 0 && step <= max_step, "data: step ", step, " (expected 0 to ", max_step, ")");
  HS_CHECK(
      micro_batch >= 0 && micro_batch < options_.accumulation,
      "data: micro-batch ",
      micro_batch,
      " (expected 0 to ",
      options_.accumulation - 1,
      ")"
  );
  HS_CHECK(
      rank >= 0 && rank < world_size, "data: rank ", rank, " (expected 0 to ", world_size - 1, ")"
  );
  return step * options_.global_batch + (micro_batch * world_size + rank) * rows;
}

Batch TokenDataset::batch(
    std::int64_t step, std::int64_t micro_batch, std::int64_t rank, std::int64_t world_size
) const {
  const std::int64_t first = first_sample(step, micro_batch, rank, world_size);
  const std::int64_t rows = rows_per_rank(world_size);
  const std::int64_t length = options_.sequence_length;
  Batch batch{
      .input = at::empty({rows, length}, at::kLong), .target = at::empty({rows, length}, at::kLong)
  };
  auto* input = batch.input.mutable_data_ptr<std::int64_t>();
  auto* target = batch.target.mutable_data_ptr<std::int64_t>();
  const auto size = static_cast<std::size_t>(length);
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::uint64_t begin = sample_begin(first + row);
    file_.read(begin, std::span(input + row * length, size));
    file_.read(begin + 1, std::span(target + row * length, size));
  }
  return batch;
}

void TokenDataset::will_need(
    std::int64_t step, std::int64_t micro_batch, std::int64_t rank, std::int64_t world_size
) const {
  const std::int64_t first = first_sample(step, micro_batch, rank, world_size);
  const std::int64_t rows = rows_per_rank(world_size);
  for (std::int64_t row = 0; row < rows; ++row) {
    file_.will_need(
        sample_begin(first + row), static_cast<std::uint64_t>(options_.sequence_length) + 1
    );
  }
}

double TokenDataset::epochs_before(std::int64_t step) const {
  return static_cast<double>(step) * static_cast<double>(options_.global_batch) /
         static_cast<double>(num_windows_);
}

}  // namespace hypershard::data
