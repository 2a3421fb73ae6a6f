// See gradient_buffers.h.
#include "hypershard/shard/gradient_buffers.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "hypershard/core/error.h"
#include "hypershard/core/huge_pages.h"
#include "hypershard/shard/buffer_pool.h"

namespace hypershard::shard {

namespace {

std::map<std::int64_t, int> count_sizes(const std::vector<std::int64_t>& unit_bytes, int depth) {
  std::map<std::int64_t, int> counts;
  for (const std::int64_t bytes : unit_bytes) {
    if (bytes > 0) {
      counts[bytes] = std::min(counts[bytes] + 1, depth);
    }
  }
  return counts;
}

}  // namespace

GradientBuffers::GradientBuffers(
    const std::vector<std::int64_t>& unit_bytes,
    int depth,
    Until until,
    comm::Communicator* reader,
    Counters* counters,
    std::function<void(UnitReduction&)> drive
)
    : until_(until), counters_(counters), drive_(std::move(drive)) {
  HS_CHECK_GE(
      depth, 1, "shard: gradient_buffers is the number of units whose reduction may be in flight"
  );
  depths_ = count_sizes(unit_bytes, depth);
  if (reader == nullptr || !reader->has_shared_memory()) {
    return;  // buffers come one by one, when first needed
  }
  std::int64_t total = 0;
  for (const auto& [bytes, count] : depths_) {
    total += align_bytes(bytes) * count;
  }
  if (total == 0) {
    return;
  }
  arena_ = reader->allocate_symmetric(total, "gradient buffers");
  counters_->gradient_buffer_bytes += total;
  std::byte* next = arena_->local();
  for (const auto& [bytes, count] : depths_) {
    for (int i = 0; i < count; ++i) {
      auto buffer = std::make_unique<Buffer>();
      buffer->bytes = at::from_blob(
          next, {bytes}, [arena = arena_](void*) {}, at::TensorOptions().dtype(at::kByte)
      );
      row(bytes).push_back(std::move(buffer));
      next += align_bytes(bytes);
    }
  }
}

GradientBuffers::Buffer* GradientBuffers::add_private(Row& row, std::int64_t bytes) {
  auto buffer = std::make_unique<Buffer>();
  buffer->bytes = at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
  advise_huge_pages(buffer->bytes.mutable_data_ptr(), bytes);
  counters_->gradient_buffer_bytes += bytes;
  row.push_back(std::move(buffer));
  return row.back().get();
}

bool GradientBuffers::may_wait_for(const Buffer& buffer) const {
  return !buffer.last || !buffer.last->held_up() ||
         (until_ == Until::kLeft && buffer.last->leaves_early());
}

GradientBuffers::Buffer* GradientBuffers::acquire(std::int64_t bytes) {
  Row& candidates = row(bytes);
  // The row is a queue: the free one in front was released longest ago.
  const auto free =
      std::find_if(candidates.begin(), candidates.end(), [](const auto& b) { return !b->busy; });
  // While there may be more, one more: which earlier unit a rank waits for must not depend on how
  // far that is, or two ranks could wait for each other. And if all are being written, or wait for
  // a unit that comes earlier in the order or later in its bucket, only a buffer more can help.
  const bool may_add = static_cast<int>(candidates.size()) < depths_[bytes];
  Buffer* chosen = nullptr;
  if (free == candidates.end() || may_add || !may_wait_for(**free)) {
    chosen = add_private(candidates, bytes);
  } else {
    std::rotate(free, free + 1, candidates.end());
    chosen = candidates.back().get();
  }
  if (chosen->last) {
    drive_(*chosen->last);
    chosen->last = nullptr;
  }
  chosen->busy = true;
  return chosen;
}

void GradientBuffers::release(Buffer* buffer, std::shared_ptr<UnitReduction> reduction) {
  buffer->last = std::move(reduction);
  buffer->busy = false;
}

}  // namespace hypershard::shard
