// See gradient_buffers.h.
#include "hypershard/shard/gradient_buffers.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "hypershard/core/error.h"
#include "hypershard/shard/buffer_pool.h"

namespace hypershard::shard {

namespace {

std::map<std::int64_t, std::int64_t> count_sizes(
    const std::vector<std::int64_t>& unit_bytes, int depth
) {
  std::map<std::int64_t, std::int64_t> counts;
  for (const std::int64_t bytes : unit_bytes) {
    if (bytes > 0) {
      counts[bytes] = std::min<std::int64_t>(counts[bytes] + 1, depth);
    }
  }
  return counts;
}

}  // namespace

GradientBuffers::GradientBuffers(
    const std::vector<std::int64_t>& unit_bytes,
    int depth,
    comm::Communicator* reader,
    Counters* counters,
    std::function<void(const comm::WorkPtr&)> drive
)
    : counters_(counters), drive_(std::move(drive)) {
  HS_CHECK_GE(
      depth, 1, "shard: gradient_buffers is the number of units whose reduction may be in flight"
  );
  const auto counts = count_sizes(unit_bytes, depth);
  if (reader == nullptr || !reader->has_shared_memory()) {
    return;  // buffers come one by one, when first needed
  }
  std::int64_t total = 0;
  for (const auto& [bytes, count] : counts) {
    total += align_bytes(bytes) * count;
  }
  if (total == 0) {
    return;
  }
  arena_ = reader->allocate_symmetric(total, "gradient buffers");
  counters_->gradient_buffer_bytes += total;
  std::byte* next = arena_->local();
  for (const auto& [bytes, count] : counts) {
    for (std::int64_t i = 0; i < count; ++i) {
      auto buffer = std::make_unique<Buffer>();
      buffer->bytes = at::from_blob(
          next, {bytes}, [arena = arena_](void*) {}, at::TensorOptions().dtype(at::kByte)
      );
      row(bytes).push_back(std::move(buffer));
      next += align_bytes(bytes);
    }
  }
}

void GradientBuffers::add_private(Row& row, std::int64_t bytes) {
  auto buffer = std::make_unique<Buffer>();
  buffer->bytes = at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
  counters_->gradient_buffer_bytes += bytes;
  row.push_back(std::move(buffer));
}

GradientBuffers::Buffer* GradientBuffers::acquire(std::int64_t bytes) {
  Row& candidates = row(bytes);
  const auto free =
      std::find_if(candidates.begin(), candidates.end(), [](const auto& b) { return !b->busy; });
  Buffer* chosen = nullptr;
  if (free == candidates.end()) {
    // All are being written, or wait for a unit that comes earlier in the order: only a buffer more
    // can help.
    add_private(candidates, bytes);
    chosen = candidates.back().get();
  } else {
    // The row is a queue: the one in front was released longest ago.
    std::rotate(candidates.begin(), free, free + 1);
    std::rotate(candidates.begin(), candidates.begin() + 1, candidates.end());
    chosen = candidates.back().get();
  }
  if (chosen->last) {
    drive_(chosen->last);
    chosen->last = nullptr;
  }
  chosen->busy = true;
  return chosen;
}

void GradientBuffers::release(Buffer* buffer, comm::WorkPtr reduction) {
  buffer->last = std::move(reduction);
  buffer->busy = false;
}

}  // namespace hypershard::shard
