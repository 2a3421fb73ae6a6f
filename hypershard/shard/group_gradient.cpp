// The gradient plane of a group: one buffer per accumulation, reduced in place, brought to rest as
// update gradients.
#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "hypershard/core/error.h"
#include "hypershard/layout/sharding.h"
#include "hypershard/shard/group.h"

namespace hypershard::shard {

// A group meets the few buffers of its unit again and again; views of them are made once.
const at::Tensor& BufferViews::at(
    const at::Tensor& memory, std::int64_t offset_bytes, std::int64_t numel, c10::ScalarType dtype
) {
  const void* data = static_cast<const std::byte*>(memory.const_data_ptr()) + offset_bytes;
  for (const View& cached : views_) {
    if (cached.data == data && cached.tensor.numel() == numel) {
      return cached.tensor;
    }
  }
  HS_ASSERT(
      views_.size() < kMostBuffers,
      "shard: a group met more buffers than there can be for gradients"
  );
  views_.push_back({.data = data, .tensor = typed_view(memory, offset_bytes, numel, dtype)});
  return views_.back().tensor;
}

void ParamGroup::set_gradient_buffer(const at::Tensor& memory, std::int64_t offset_bytes) {
  set_gradient_slot(slots_.at(memory, offset_bytes, packing_.numel, dtypes_.reduce));
}

void ParamGroup::set_gradient_slot(const at::Tensor& slot) {
  slot_ = slot;
  written_.assign(params_.size(), 0);
  const void* data = slot_.const_data_ptr();
  for (const SlotViews& cached : slot_cache_) {
    if (cached.data == data) {
      slot_views_ = &cached.views;
      return;
    }
  }
  SlotViews fresh{.data = data, .views = {}};
  for (const layout::Segment& segment : packing_.segments) {
    fresh.views.push_back(slot_.narrow(0, segment.offset, segment.numel).view(segment.shape));
  }
  slot_cache_.push_back(std::move(fresh));
  slot_views_ = &slot_cache_.back().views;
}

void ParamGroup::zero_gradient(layout::Range range) {
  const auto item = static_cast<std::int64_t>(slot_.element_size());
  if (range.numel() > 0) {
    auto* data = static_cast<std::byte*>(slot_.mutable_data_ptr()) + range.begin * item;
    // Zero bits are zero in every dtype.
    std::memset(data, 0, static_cast<std::size_t>(range.numel() * item));
    counters_->zeroed_bytes += range.numel() * item;
  }
}

void ParamGroup::complete_gradient() {
  for (std::size_t i = 0; i < params_.size(); ++i) {
    if (written_[i] == 0) {
      const layout::Segment& segment = packing_.segments[i];
      zero_gradient({segment.offset, segment.offset + segment.numel});
      written_[i] = 1;
    }
  }
  for (const layout::Range& gap : gaps_) {
    zero_gradient(gap);
  }
}

void ParamGroup::drop_gradient_buffer() {
  slot_ = at::Tensor();
  slot_views_ = nullptr;
}

void ParamGroup::allocate_rest() {
  if (!rest_.defined()) {
    const layout::Range plane = gradient_range();
    rest_ = at::zeros({plane.numel()}, at::TensorOptions().dtype(dtypes_.update));
    for (const UpdateTensor& update : updates_) {
      const std::int64_t begin = update.range.numel() == 0 ? 0 : update.range.begin - plane.begin;
      void* data = rest_.narrow(0, begin, update.range.numel()).mutable_data_ptr();
      rest_of_.push_back(flat_tensor(
          data, update.range.numel(), dtypes_.update, std::make_shared<at::Tensor>(rest_)
      ));
    }
  }
}

// A question of the layout, not of sizes: ranks of the plan axes must answer it alike, and one of
// them may hold no element.
bool ParamGroup::gradient_is_whole() const {
  const auto levels = parallel_->cuts.begin() + parallel_->gradient_levels;
  return std::all_of(parallel_->cuts.begin(), levels, [](const DataAxis& axis) {
    return axis.size == 1;
  });
}

at::Tensor ParamGroup::whole_rest() {
  if (!gradient_is_whole() || dtypes_.reduce != dtypes_.update || !gradient_is_fresh()) {
    return {};
  }
  allocate_rest();
  return rest_;
}

// Inner axes first: a sum must be complete inside the supernode before it crosses.
void ParamGroup::plan_reduction() {
  inside_.range = {0, packing_.numel};
  for (int level = 0; level < parallel_->gradient_levels; ++level) {
    const DataAxis& axis = parallel_->cuts[static_cast<std::size_t>(level)];
    SumStep& step = axis.name == parallel_->replicate_axis ? between_ : inside_;
    if (axis.size > 1) {
      step = {
          .axis = &axis,
          .scatters = true,
          .range = packing_.range(parallel_->coordinates(level + 1)),
          .counts = packing_.counts(parallel_->coordinates(level))
      };
    }
  }
  for (const DataAxis& axis : parallel_->summed) {
    SumStep& step = axis.name == parallel_->replicate_axis ? between_ : inside_;
    if (axis.size > 1) {
      step.axis = &axis;
    }
  }
  share_crossing();
  if (!between_.scatters) {
    between_.range = inside_.range;
  }
}

// What every rank is to have whole crosses between supernodes once a supernode: each rank takes a
// share across, and the shares are joined inside.
void ParamGroup::share_crossing() {
  const bool sums_both = inside_.axis != nullptr && between_.axis != nullptr;
  if (!sums_both || inside_.scatters || between_.scatters) {
    return;
  }
  const std::int64_t unit = packing_.alignment;
  for (int rank = 0; rank < inside_.axis->size; ++rank) {
    const layout::Range share = layout::cut_piece(packing_.numel / unit, inside_.axis->size, rank);
    inside_.counts.push_back(share.numel() * unit);
    if (rank == inside_.axis->coordinate) {
      inside_.range = {share.begin * unit, share.end * unit};
    }
  }
  inside_.scatters = true;
  joins_inside_ = true;
}

bool ParamGroup::wants_slice(const ReduceOptions& options) const {
  return inside_.scatters && !joins_inside_ && between_.axis != nullptr && options.cross &&
         !(sums_at_rest() && !options.rest_in_buffer && gradient_is_fresh());
}

std::int64_t ParamGroup::slice_bytes() const {
  const std::int64_t pieces = inside_.axis == nullptr ? 1 : inside_.axis->size;
  const std::int64_t numel = std::max(inside_.range.numel(), (buffer_numel_ + pieces - 1) / pieces);
  return numel * static_cast<std::int64_t>(c10::elementSize(dtypes_.reduce));
}

std::int64_t ParamGroup::crossing_bytes() const {
  if (between_.axis == nullptr) {
    return 0;
  }
  const std::int64_t pieces = inside_.scatters ? inside_.axis->size : 1;
  return (buffer_numel_ + pieces - 1) / pieces *
         static_cast<std::int64_t>(c10::elementSize(dtypes_.wire.value_or(dtypes_.reduce)));
}

// A reduce-scatter may write what is wider than what it reads, and nothing narrower.
bool ParamGroup::widens_to_update() const {
  return c10::elementSize(dtypes_.update) >= c10::elementSize(dtypes_.reduce);
}

std::int64_t ParamGroup::publish_bytes() const {
  std::int64_t pieces = 1;
  for (int level = 0; level < parallel_->runtime_levels; ++level) {
    pieces *= parallel_->cuts[static_cast<std::size_t>(level)].size;
  }
  return (buffer_numel_ + pieces - 1) / pieces *
         static_cast<std::int64_t>(c10::elementSize(dtypes_.storage));
}

// Where the gradient plane lies like the sum inside the supernode, all that follows is in place.
bool ParamGroup::sums_at_rest() const {
  return !between_.scatters && dtypes_.reduce == dtypes_.update;
}

void ParamGroup::set_slice(
    GroupReduction& reduction, const at::Tensor& memory, std::int64_t offset_bytes
) {
  reduction.slice = slices_.at(memory, offset_bytes, inside_.range.numel(), dtypes_.reduce);
}

GroupReduction ParamGroup::begin_reduction(const ReduceOptions& options) {
  GroupReduction reduction;
  reduction.group = this;
  reduction.sum = slot_;
  if (joins_inside_) {
    reduction.whole = slot_;
  }
  reduction.divisor = options.divisor;
  // Decided when the reduction starts; the user may drop or keep gradients only between steps.
  const bool empty = gradient_is_fresh();
  if (!options.cross && between_.axis != nullptr) {
    reduction.rest = Rest::kPartial;
    return reduction;
  }
  if (options.rest_in_buffer && dtypes_.reduce == dtypes_.update && empty) {
    reduction.rest = Rest::kInBuffer;
    return reduction;
  }
  allocate_rest();
  reduction.fresh = empty && widens_to_update();
  const bool is_there = packing_.numel > 0 && rest_.const_data_ptr() == slot_.const_data_ptr();
  reduction.rest = is_there ? Rest::kArrived : Rest::kElsewhere;
  return reduction;
}

comm::Reduction ParamGroup::sum_or_mean(GroupReduction& reduction, bool is_last) const {
  const double divisor = is_last ? std::exchange(reduction.divisor, 1) : 1;
  return {comm::ReduceOp::kSum, divisor};
}

void ParamGroup::sum_inside(GroupReduction& reduction) {
  counters_->reduced_bytes += slot_.numel() * static_cast<std::int64_t>(slot_.element_size());
  if (inside_.axis == nullptr) {
    return;
  }
  comm::Communicator& ranks = *inside_.axis->reduce;
  const bool is_last = between_.axis == nullptr && plan_reduce_ == nullptr;
  const comm::Reduction how = sum_or_mean(reduction, is_last);
  if (!inside_.scatters) {
    reduction.work = ranks.all_reduce(slot_, how, unit_);
    return;
  }
  const bool stays = reduction.rest == Rest::kPartial;
  if (stays && !partial_live_ && widens_to_update()) {
    reduction.sum = new_partial(inside_.range.numel());
  } else if (reduction.fresh && !joins_inside_ &&
             (!crosses(reduction) || (sums_at_rest() && !partial_live_))) {
    reduction.sum = rest_;
    reduction.rest = Rest::kArrived;
  } else if (reduction.slice.defined()) {
    reduction.sum = reduction.slice;
  } else {
    reduction.sum = slot_.narrow(0, inside_.range.begin, inside_.range.numel());
  }
  reduction.work = ranks.reduce_scatter(reduction.sum, slot_, inside_.counts, how, unit_);
}

std::optional<SumBetween> ParamGroup::sum_between(GroupReduction& reduction) {
  if (!crosses(reduction)) {
    return std::nullopt;
  }
  if (partial_live_) {
    const c10::NoGradGuard no_grad;
    reduction.sum.add_(partial_);
    counters_->accumulated_bytes +=
        reduction.sum.numel() * static_cast<std::int64_t>(reduction.sum.element_size());
    partial_live_ = false;
  }
  comm::Communicator& ranks = *between_.axis->reduce;
  comm::Reduction how = sum_or_mean(reduction, plan_reduce_ == nullptr);
  how.wire = dtypes_.wire;
  if (!between_.scatters) {
    reduction.work = ranks.all_reduce(reduction.sum, how, unit_);
    return std::nullopt;
  }
  const at::Tensor input = reduction.sum;
  if (reduction.fresh) {
    reduction.sum = rest_;
    reduction.rest = Rest::kArrived;
  } else {
    reduction.sum =
        input.narrow(0, between_.range.begin - inside_.range.begin, between_.range.numel());
  }
  return SumBetween{
      .segment = {.output = reduction.sum, .input = input, .counts = between_.counts},
      .how = how,
      .ranks = &ranks
  };
}

void ParamGroup::sum_plan(GroupReduction& reduction) {
  if (plan_reduce_ == nullptr || reduction.rest == Rest::kPartial) {
    return;
  }
  counters_->plan_reduced_bytes +=
      reduction.sum.numel() * static_cast<std::int64_t>(reduction.sum.element_size());
  reduction.work =
      plan_reduce_->all_reduce(reduction.sum, sum_or_mean(reduction, /*is_last=*/true), unit_);
}

bool ParamGroup::sum_joins(const GroupReduction& reduction) const {
  return joins_inside_ && reduction.rest != Rest::kPartial;
}

void ParamGroup::join_inside(GroupReduction& reduction) {
  if (!sum_joins(reduction)) {
    return;
  }
  const at::Tensor share = std::exchange(reduction.sum, reduction.whole);
  // Not among the reductions, which later units start meanwhile, at a time of their own.
  reduction.work = inside_.axis->gather->all_gather(reduction.whole, share, inside_.counts, unit_);
}

bool ParamGroup::leaves_early(const GroupReduction& reduction) const {
  return inside_.axis != nullptr && inside_.scatters && !joins_inside_ &&
         (reduction.slice.defined() || reduction.rest == Rest::kArrived);
}

void ParamGroup::drop_reduced() {
  for (const UpdateTensor& update : updates_) {
    at::Tensor tensor = update.tensor;
    tensor.mutable_grad() = at::Tensor();
  }
  partial_live_ = false;
}

const at::Tensor& ParamGroup::new_partial(std::int64_t numel) {
  if (!partial_.defined()) {
    partial_ = at::empty({numel}, at::TensorOptions().dtype(dtypes_.update));
  }
  return partial_;
}

void ParamGroup::keep_partial(const at::Tensor& sum) {
  const auto moved = sum.numel() * static_cast<std::int64_t>(sum.element_size());
  if (partial_live_) {
    partial_.add_(sum);
    counters_->accumulated_bytes += moved;
    return;
  }
  partial_live_ = true;
  if (!sum.is_same(partial_)) {  // else it was summed there
    at::Tensor partial = new_partial(sum.numel());
    partial.copy_(sum);
    counters_->copied_bytes += moved;
  }
}

// Division comes last and once, after the sum over all axes: the order is part of the numerics.
void ParamGroup::rest(GroupReduction& reduction) {
  const c10::NoGradGuard no_grad;
  if (reduction.rest == Rest::kPartial) {
    keep_partial(reduction.sum);
    return;
  }
  if (reduction.divisor != 1.0) {
    reduction.sum.div_(reduction.divisor);
  }
  for (std::size_t i = 0; i < updates_.size(); ++i) {
    if (reduction.rest == Rest::kArrived) {
      at::Tensor tensor = updates_[i].tensor;
      tensor.mutable_grad() = rest_of_[i];
    } else {
      bring_to_rest(i, reduction);
    }
  }
}

void ParamGroup::bring_to_rest(std::size_t index, const GroupReduction& reduction) {
  const UpdateTensor& update = updates_[index];
  at::Tensor tensor = update.tensor;
  const std::int64_t origin = joins_inside_ ? 0 : between_.range.begin;
  const std::int64_t begin = update.range.numel() == 0 ? 0 : update.range.begin - origin;
  const at::Tensor part = reduction.sum.narrow(0, begin, update.range.numel());
  const auto moved = part.numel() * static_cast<std::int64_t>(part.element_size());
  if (reduction.rest == Rest::kInBuffer) {
    tensor.mutable_grad() = flat_tensor(
        part.mutable_data_ptr(), part.numel(), dtypes_.update, std::make_shared<at::Tensor>(part)
    );
  } else if (tensor.grad().defined()) {
    tensor.mutable_grad().add_(part);
    counters_->accumulated_bytes += moved;
  } else {
    rest_of_[index].copy_(part);
    counters_->copied_bytes += moved;
    tensor.mutable_grad() = rest_of_[index];
  }
}

}  // namespace hypershard::shard
