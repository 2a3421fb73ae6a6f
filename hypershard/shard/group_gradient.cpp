// The gradient plane of a group: one buffer per accumulation, reduced in place, brought to rest as
// update gradients.
#include <algorithm>
#include <cstring>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "hypershard/core/error.h"
#include "hypershard/shard/group.h"

namespace hypershard::shard {

namespace {

void zero(const at::Tensor& flat, Counters* counters) {
  const std::int64_t bytes = flat.numel() * flat.element_size();
  if (bytes > 0) {
    std::memset(
        flat.mutable_data_ptr(), 0, static_cast<std::size_t>(bytes)
    );  // zero bits are zero in every dtype
    counters->zeroed_bytes += bytes;
  }
}

}  // namespace

void ParamGroup::set_gradient_buffer(const at::Tensor& slot) {
  slot_ = slot;
  written_.assign(params_.size(), 0);
  void* data = slot.mutable_data_ptr();
  for (const SlotViews& cached : slot_cache_) {
    if (cached.data == data) {
      slot_views_ = &cached.views;
      return;
    }
  }
  SlotViews fresh{.data = data, .views = {}};
  for (const layout::Segment& segment : packing_.segments) {
    fresh.views.push_back(slot.narrow(0, segment.offset, segment.numel).view(segment.shape));
  }
  slot_cache_.reserve(64);  // views are referred to by address
  HS_ASSERT(
      slot_cache_.size() < 64,
      "shard: group '",
      name_,
      "' met more gradient buffers than there can be"
  );
  slot_cache_.push_back(std::move(fresh));
  slot_views_ = &slot_cache_.back().views;
}

void ParamGroup::complete_gradient() {
  for (std::size_t i = 0; i < params_.size(); ++i) {
    if (written_[i] == 0) {
      zero(slot_.narrow(0, packing_.segments[i].offset, packing_.segments[i].numel), counters_);
      written_[i] = 1;
    }
  }
  for (const layout::Range& gap : gaps_) {
    zero(slot_.narrow(0, gap.begin, gap.numel()), counters_);
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

// NOLINTNEXTLINE(readability-function-size): one loop over steps that share where the sum lies
void ParamGroup::add_reduce_stages(
    std::vector<StagedWork::Stage>& stages,
    const ReduceOptions& options,
    const std::string& replicate_axis
) {
  const bool stays =
      options.rest_in_buffer && dtypes_.reduce == dtypes_.update && gradient_is_fresh();
  if (!stays) {
    allocate_rest();
  }
  // Decided when the reduction starts; the user may drop or keep gradients only between steps.
  const bool fresh = !stays && gradient_is_fresh() &&
                     c10::elementSize(dtypes_.update) >= c10::elementSize(dtypes_.reduce);
  const auto reduced_bytes = slot_.numel() * slot_.element_size();
  const at::Tensor slot = slot_;

  struct Step {
    const DataAxis* axis;
    bool scatter;
    int level;
  };
  std::vector<Step> inner;
  std::vector<Step> outer;
  const auto add = [&](const DataAxis& axis, bool scatter, int level) {
    if (axis.size > 1) {
      (axis.name == replicate_axis ? outer : inner).push_back({&axis, scatter, level});
    }
  };
  for (int level = 0; level < parallel_->gradient_levels; ++level) {
    add(parallel_->cuts[static_cast<std::size_t>(level)], true, level);
  }
  for (const DataAxis& axis : parallel_->summed) {
    add(axis, false, 0);
  }

  layout::Range here{0, packing_.numel};
  at::Tensor current = slot;
  bool in_rest = !stays && rest_.data_ptr() == slot.data_ptr() && packing_.numel > 0;
  bool divided = false;  // by the collective that brings the sum to rest, at no pass of its own
  const auto run = [&](const Step& step, bool last) {
    const bool divides = last && plan_reduce_ == nullptr;
    const layout::Range before = here;
    at::Tensor input = current;
    if (step.scatter) {
      here = packing_.range(parallel_->coordinates(step.level + 1));
    }
    const comm::Reduction reduction{comm::ReduceOp::kSum, divides ? options.divisor : 1};
    divided = divides;
    if (!step.scatter) {
      stages.push_back([this, axis = step.axis, input, reduction] {
        return axis->reduce->all_reduce(input, reduction, unit_);
      });
      return;
    }
    const bool to_rest = last && fresh;
    current = to_rest ? rest_ : input.narrow(0, here.begin - before.begin, here.numel());
    in_rest = to_rest;
    stages.push_back([this,
                      axis = step.axis,
                      input,
                      output = current,
                      reduction,
                      counts = packing_.counts(parallel_->coordinates(step.level))] {
      return axis->reduce->reduce_scatter(output, input, counts, reduction, unit_);
    });
  };

  counters_->reduced_bytes += reduced_bytes;
  for (std::size_t i = 0; i < inner.size(); ++i) {
    run(inner[i], outer.empty() && !partial_live_ && i + 1 == inner.size());
  }
  if (!options.cross && !outer.empty()) {
    stages.push_back([this, current] {
      const c10::NoGradGuard no_grad;
      const auto moved = current.numel() * current.element_size();
      if (partial_live_) {
        partial_.add_(current);
        counters_->accumulated_bytes += moved;
      } else {
        if (!partial_.defined()) {
          partial_ = at::empty({current.numel()}, at::TensorOptions().dtype(dtypes_.update));
        }
        partial_.copy_(current);
        counters_->copied_bytes += moved;
      }
      partial_live_ = true;
      return comm::WorkPtr();
    });
    return;
  }
  if (partial_live_) {
    stages.push_back([this, current] {
      const c10::NoGradGuard no_grad;
      at::Tensor slice = current;
      slice.add_(partial_);
      counters_->accumulated_bytes += slice.numel() * slice.element_size();
      partial_live_ = false;
      return comm::WorkPtr();
    });
  }
  for (std::size_t i = 0; i < outer.size(); ++i) {
    run(outer[i], i + 1 == outer.size());
  }
  if (plan_reduce_ != nullptr) {
    counters_->plan_reduced_bytes += current.numel() * current.element_size();
    stages.push_back(
        [this, current, reduction = comm::Reduction{comm::ReduceOp::kSum, options.divisor}] {
          return plan_reduce_->all_reduce(current, reduction, unit_);
        }
    );
    divided = true;
  }
  const Rest rest = stays ? Rest::kInBuffer : in_rest ? Rest::kArrived : Rest::kElsewhere;
  stages.push_back([this, current, left = divided ? 1 : options.divisor, rest] {
    finish_reduce(current, left, rest);
    return comm::WorkPtr();
  });
}

void ParamGroup::drop_reduced() {
  for (const UpdateTensor& update : updates_) {
    at::Tensor tensor = update.tensor;
    tensor.mutable_grad() = at::Tensor();
  }
  partial_live_ = false;
}

// Division comes last and once, after the sum over all axes: the order is part of the numerics.
void ParamGroup::finish_reduce(const at::Tensor& slice, double divisor, Rest rest) {
  const c10::NoGradGuard no_grad;
  at::Tensor sum = slice;
  if (divisor != 1.0) {
    sum.div_(divisor);
  }
  const layout::Range plane = gradient_range();
  for (std::size_t i = 0; i < updates_.size(); ++i) {
    const UpdateTensor& update = updates_[i];
    at::Tensor tensor = update.tensor;
    if (rest == Rest::kArrived) {
      tensor.mutable_grad() = rest_of_[i];
      continue;
    }
    const at::Tensor part = sum.narrow(
        0, update.range.numel() == 0 ? 0 : update.range.begin - plane.begin, update.range.numel()
    );
    if (rest == Rest::kInBuffer) {
      tensor.mutable_grad() = flat_tensor(
          part.mutable_data_ptr(), part.numel(), dtypes_.update, std::make_shared<at::Tensor>(part)
      );
      continue;
    }
    const auto moved = part.numel() * part.element_size();
    if (tensor.grad().defined()) {
      tensor.mutable_grad().add_(part);
      counters_->accumulated_bytes += moved;
    } else {
      rest_of_[i].copy_(part);
      counters_->copied_bytes += moved;
      tensor.mutable_grad() = rest_of_[i];
    }
  }
}

}  // namespace hypershard::shard
