// See unit.h.
#include "hypershard/shard/unit.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>

#include "hypershard/core/error.h"

namespace hypershard::shard {

Unit::Unit(
    int index,
    std::string path,
    bool is_root,
    std::vector<std::unique_ptr<ParamGroup>> groups,
    BufferPool* pool,
    Counters* counters
)
    : index_(index),
      path_(std::move(path)),
      is_root_(is_root),
      groups_(std::move(groups)),
      pool_(pool),
      counters_(counters) {}

std::int64_t Unit::whole_bytes(RuntimeMode mode) const {
  std::int64_t bytes = 0;
  for (const auto& group : groups_) {
    bytes += group->mode() == mode ? align_bytes(group->whole_compute_bytes()) : 0;
  }
  return bytes;
}

bool Unit::has_trainable() const {
  return std::any_of(groups_.begin(), groups_.end(), [](const auto& g) { return g->trainable(); });
}

bool Unit::has_frozen() const {
  return std::any_of(groups_.begin(), groups_.end(), [](const auto& g) { return !g->trainable(); });
}

bool Unit::shares_memory() const {
  return std::any_of(groups_.begin(), groups_.end(), [](const auto& g) {
    return g->mode() == RuntimeMode::kShared;
  });
}

void Unit::start_unshard() {
  if (state_ != UnitState::kSharded) {
    return;
  }
  std::int64_t storage_bytes = 0;
  for (const auto& group : groups_) {
    const bool casts = group->gathers() && group->dtypes().storage != group->dtypes().compute;
    storage_bytes += casts ? align_bytes(group->whole_storage_bytes()) : 0;
  }
  if (const std::int64_t bytes = whole_bytes(RuntimeMode::kPooled); bytes > 0) {
    shared_buffer_ = &shared_pool_->acquire(index_);
  }
  if (const std::int64_t bytes = whole_bytes(RuntimeMode::kGathered); bytes > 0) {
    compute_buffer_ = pool_->acquire(bytes, c10::Device(c10::kCPU));
  }
  if (storage_bytes > 0) {
    storage_buffer_ = pool_->acquire(storage_bytes, c10::Device(c10::kCPU));
  }
  unshard_span_.begin();
  start_gathers();
  state_ = UnitState::kUnsharding;
  ++counters_->unshards;
}

// Later stages run group by group, so the last group of a shared buffer lands it for all of them.
void Unit::start_gathers() {
  std::vector<std::vector<StagedWork::Stage>> works;
  std::vector<StagedWork::Stage>* last_shared = nullptr;
  std::int64_t shared_at = 0;
  std::int64_t compute_at = 0;
  std::int64_t storage_at = 0;
  works.reserve(groups_.size());
  for (const auto& group : groups_) {
    if (!group->gathers() || group->packing().numel == 0) {
      continue;
    }
    const bool is_shared = group->mode() == RuntimeMode::kPooled;
    std::int64_t& at = is_shared ? shared_at : compute_at;
    const at::Tensor& memory = is_shared ? shared_buffer_->write : compute_buffer_;
    const at::Tensor compute = memory.narrow(0, at, group->whole_compute_bytes());
    at += align_bytes(group->whole_compute_bytes());
    at::Tensor storage = compute;
    if (group->dtypes().storage != group->dtypes().compute) {
      storage = storage_buffer_.narrow(0, storage_at, group->whole_storage_bytes());
      storage_at += align_bytes(group->whole_storage_bytes());
    }
    group->add_unshard_stages(works.emplace_back(), storage, compute);
    last_shared = is_shared ? &works.back() : last_shared;
  }
  if (last_shared != nullptr) {
    last_shared->push_back([this] { return shared_pool_->land(path_); });
  }
  if (works.empty()) {
    return;
  }
  unshard_ = std::make_shared<WorkSet>();
  for (auto& stages : works) {
    unshard_->add(std::move(stages));
  }
  unshard_->start();
}

void Unit::finish_unshard() {
  HS_ASSERT(state_ != UnitState::kSharded, "shard: unit '", path_, "' was never started");
  if (state_ == UnitState::kUnsharded) {
    return;
  }
  if (unshard_) {
    unshard_->wait();
  }
  std::int64_t shared_at = 0;
  std::int64_t compute_at = 0;
  const at::Tensor shared = shared_buffer_ == nullptr ? at::Tensor() : shared_buffer_->read;
  for (const auto& group : groups_) {
    const bool is_shared = group->mode() == RuntimeMode::kPooled;
    const at::Tensor& memory = is_shared ? shared : compute_buffer_;
    if (!group->gathers() || !memory.defined()) {
      group->attach({});
      continue;
    }
    std::int64_t& at = is_shared ? shared_at : compute_at;
    group->attach(memory.narrow(0, at, group->whole_compute_bytes()));
    at += align_bytes(group->whole_compute_bytes());
  }
  state_ = UnitState::kUnsharded;
  unshard_span_.end(TraceLane::kUnshard, "unshard ", path_);
}

void Unit::reshard() {
  if (state_ == UnitState::kSharded) {
    return;
  }
  HS_ASSERT(
      state_ == UnitState::kUnsharded, "shard: unit '", path_, "' is resharded while it is gathered"
  );
  for (const auto& group : groups_) {
    group->detach();
  }
  if (unshard_) {
    unshard_->wait_released();
    unshard_ = nullptr;
  }
  if (shared_buffer_ != nullptr) {
    shared_pool_->release(*std::exchange(shared_buffer_, nullptr));
  }
  if (storage_buffer_.defined()) {
    pool_->release(std::exchange(storage_buffer_, at::Tensor()));
  }
  if (compute_buffer_.defined()) {
    pool_->release(std::exchange(compute_buffer_, at::Tensor()));
  }
  state_ = UnitState::kSharded;
  ++counters_->reshards;
}

bool Unit::write_runtime(bool even_frozen) {
  bool any = false;
  for (const auto& group : groups_) {
    any = group->write_runtime(even_frozen) || any;
  }
  return any;
}

comm::WorkPtr Unit::start_publish() {
  auto work = std::make_shared<WorkSet>();
  for (const auto& group : groups_) {
    std::vector<StagedWork::Stage> stages;
    group->add_publish_stages(stages);
    work->add(std::move(stages));
  }
  work->start();
  return work;
}

std::int64_t Unit::publish_bytes() const {
  std::int64_t total = 0;
  for (const auto& group : groups_) {
    total += group->publish_bytes();
  }
  return total;
}

std::int64_t Unit::crossing_bytes() const {
  std::int64_t total = 0;
  for (const auto& group : groups_) {
    total += group->crossing_bytes();
  }
  return total;
}

std::int64_t Unit::gradient_bytes() const {
  std::int64_t total = 0;
  for (const auto& group : groups_) {
    total += group->trainable() ? align_bytes(group->gradient_buffer_bytes()) : 0;
  }
  return total;
}

std::int64_t Unit::slice_bytes(const ReduceOptions& options) const {
  std::int64_t total = 0;
  for (const auto& group : groups_) {
    const bool wants = group->trainable() && group->wants_slice(options);
    total += wants ? align_bytes(group->slice_bytes()) : 0;
  }
  return total;
}

void Unit::take_gradient_buffer(GradientBuffers& buffers, bool held) {
  if (has_gradients_) {
    return;  // kept from a micro-batch without reduction
  }
  if (held_last_) {
    held_last_->wait_released();
    held_last_ = nullptr;
  }
  has_gradients_ = true;
  bool all_at_rest = true;
  for (const auto& group : groups_) {
    if (group->trainable()) {
      const at::Tensor rest = group->whole_rest();
      all_at_rest = all_at_rest && rest.defined();
      if (rest.defined()) {
        group->set_gradient_slot(rest);
      }
    }
  }
  if (all_at_rest) {
    return;
  }
  at::Tensor memory;
  if (held) {
    if (!held_.defined() || held_.numel() < gradient_bytes()) {  // groups may be frozen meanwhile
      held_ = at::empty({gradient_bytes()}, at::TensorOptions().dtype(at::kByte));
      counters_->gradient_buffer_bytes += held_.numel();
    }
    memory = held_;
  } else {
    buffer_ = buffers.acquire(gradient_bytes());
    memory = buffer_->bytes;
  }
  std::int64_t at = 0;
  for (const auto& group : groups_) {
    if (group->trainable()) {
      if (!group->has_gradient_buffer()) {
        group->set_gradient_buffer(memory, at);
      }
      at += align_bytes(group->gradient_buffer_bytes());
    }
  }
}

std::shared_ptr<UnitReduction> Unit::start_reduce(
    GradientBuffers& buffers, GradientBuffers& slices, const ReduceOptions& options
) {
  auto reduction = std::make_shared<UnitReduction>(this);
  for (const auto& group : groups_) {
    if (group->trainable()) {
      group->complete_gradient();
      reduction->groups().push_back(group->begin_reduction(options));
    }
  }
  if (const std::int64_t bytes = slice_bytes(options); bytes > 0) {
    GradientBuffers::Buffer* const slice = slices.acquire(bytes);
    std::int64_t at = 0;
    for (GroupReduction& each : reduction->groups()) {
      if (each.group->wants_slice(options)) {
        each.group->set_slice(each, slice->bytes, at);
        at += align_bytes(each.group->slice_bytes());
      }
    }
    slices.release(slice, reduction);
  }
  reduction->start_inside();
  for (const auto& group : groups_) {
    group->drop_gradient_buffer();
  }
  if (buffer_ != nullptr) {
    buffers.release(std::exchange(buffer_, nullptr), reduction);
  } else {
    held_last_ = reduction;
  }
  has_gradients_ = false;
  reduced = true;
  ++counters_->reductions;
  return reduction;
}

void Unit::forget_gradients(GradientBuffers& buffers) {
  for (const auto& group : groups_) {
    group->drop_gradient_buffer();
  }
  if (buffer_ != nullptr) {
    buffers.release(std::exchange(buffer_, nullptr), nullptr);
  }
  has_gradients_ = false;
}

}  // namespace hypershard::shard
