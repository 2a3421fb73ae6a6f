// The backward half of the engine: gradients arrive, units post, reductions run in the agreed
// order.
#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>

#include "hypershard/core/clock.h"
#include "hypershard/core/error.h"
#include "hypershard/core/trace.h"
#include "hypershard/nn/watched_operators.h"
#include "hypershard/shard/engine.h"
#include "hypershard/shard/internal/autograd_hooks.h"

namespace hypershard::shard {

namespace {

bool ran(const Unit& unit) {
  return unit.occurrences.plain + unit.occurrences.in_segments > 0;
}

}  // namespace

void Engine::begin_backward() {
  finish_publishes();  // of a forward that failed
  updates_in_backward_ = update_in_backward && reduces_over_all_axes();
  publishes_in_backward_ =
      updates_in_backward_ &&
      std::find(early_units_.begin(), early_units_.end(), true) != early_units_.end();
  if (publishes_in_backward_ || publisher_->has_early()) {
    publisher_->release();
    publisher_->forget_early();  // of a backward that no forward followed
  }
  in_backward_ = true;
  window_open_ = false;  // an evaluation may have opened it; we read again, and nobody steps before
                         // the end of this backward
  pass_ = Pass::kBackward;
  // Units that stay whole have nothing to start, and must not be gathered again once their backward
  // has released them.
  pass_order_.clear();
  for (const int index : backward_order_) {
    const Unit& unit = *units_[static_cast<std::size_t>(index)];
    if (unit.reshard_after_forward && !unit.pinned) {
      pass_order_.push_back(index);
    }
  }
  started_ = 0;
  next_reduction_ = 0;
  buckets_->begin(units_);
  for (const auto& unit : units_) {
    unit->ready = false;
    unit->reduced = false;
    expect_gradients(*unit);
  }
  internal::at_end_of_backward([self = weak_from_this()] {
    if (const auto engine = self.lock()) {
      engine->end_backward();
    }
  });
}

void Engine::segment_starts_again(int unit) {
  const nn::Unwatched unwatched;
  if (!in_backward_) {
    begin_backward();
  }
  expect_gradients(*units_[static_cast<std::size_t>(unit)]);
}

// In the last of several segments every gradient must come once more before the unit is complete.
void Engine::expect_gradients(Unit& unit) {
  unit.pending = 0;
  for (const auto& group : unit.groups()) {
    group->forget_arrivals();
    unit.pending += group->trainable() ? static_cast<int>(group->params().size()) : 0;
  }
}

void Engine::segment_done(int unit) noexcept {
  Unit& here = *units_[static_cast<std::size_t>(unit)];
  --here.occurrences.segments_left;
  // Posting may throw; the next event of the backward does it.
}

void Engine::pre_backward(int unit) {
  const nn::Unwatched unwatched;
  const ErrorContext context("backward");
  const ErrorContext unit_context(units_[static_cast<std::size_t>(unit)]->path());
  if (!in_backward_) {
    begin_backward();
  }
  progress();
  need(unit);
  take_buffer(*units_[static_cast<std::size_t>(unit)]);
  if (unit != backward_unit_) {
    end_backward_span(backward_unit_);
    backward_unit_ = unit;
    Unit& begun = *units_[static_cast<std::size_t>(unit)];
    // Named here, not at the end: the reduction may be drawn when later units have begun.
    begun.backward_flow = unit > 0 && trace_enabled() ? next_trace_flow() : 0;
    begun.backward_span.begin();
  }
}

// The root's stays open until the end: what lies between its units is its own.
void Engine::end_backward_span(int unit) {
  if (unit > 0) {
    Unit& ended = *units_[static_cast<std::size_t>(unit)];
    ended.backward_span.end(
        TraceLane::kCompute, "backward ", ended.path(), {.to = ended.backward_flow}
    );
  }
}

void Engine::take_buffer(Unit& unit) {
  if (unit.has_gradients() || unit.reduced || !unit.has_trainable()) {
    return;
  }
  const std::int64_t start = now_ns();
  unit.take_gradient_buffer(*gradient_buffers_, !reduce_gradients);
  counters_.reduce_wait_ns += now_ns() - start;
}

std::pair<at::Tensor, bool> Engine::claim_gradient(int unit, std::size_t group, std::size_t param) {
  const nn::Unwatched unwatched;
  Unit& here = *units_[static_cast<std::size_t>(unit)];
  if (!in_backward_ || here.reduced || !here.has_gradients()) {
    return {};
  }
  ParamGroup& target = *here.groups()[group];
  const bool overwrite = !target.written(param);
  target.set_written(param);
  if (!overwrite) {
    const at::Tensor& view = target.gradient_view(param);
    counters_.accumulated_bytes += view.numel() * view.element_size();
  }
  return {target.gradient_view(param), overwrite};
}

void Engine::gradient_ready(
    int unit, std::size_t group, std::size_t param, const at::Tensor& gradient
) {
  const nn::Unwatched unwatched;
  Unit& here = *units_[static_cast<std::size_t>(unit)];
  ParamGroup& target = *here.groups()[group];
  const std::string& name = target.params()[param].name;
  const ErrorContext context("gradient");
  const ErrorContext parameter_context(name);
  HS_CHECK(
      in_backward_ && (ran(here) || here.has_gradients()),
      "shard: a gradient arrived for parameter '",
      name,
      "' but the forward hooks of its unit '",
      here.path(),
      "' never ran in this iteration",
      HS_HINT("call forward() of the hooked module itself, not of a base class (as<Impl>()), and "
              "use a parameter only inside its unit's forward")
  );
  HS_CHECK(
      !here.reduced,
      "shard: a gradient arrived for parameter '",
      name,
      "' after its unit '",
      here.path(),
      "' had been reduced",
      HS_HINT("the unit is used again behind its own outputs, or partly recomputed: recompute "
              "whole units, or let the parameter belong to a unit that encloses all its uses")
  );
  if (gradient.defined()) {
    take_buffer(here);
    const c10::NoGradGuard no_grad;
    at::Tensor destination = target.gradient_view(param);
    const auto moved = destination.numel() * destination.element_size();
    if (target.written(param)) {
      destination.add_(gradient);
      counters_.accumulated_bytes += moved;
    } else {
      destination.copy_(gradient);
      counters_.copied_bytes += moved;
      target.set_written(param);
    }
  }
  if (target.arrive(param)) {
    --here.pending;
  }
  post_if_complete(here);
}

// See NOTE [when a unit posts].
bool Engine::may_post_early(const Unit& unit) const {
  const Occurrences& seen = unit.occurrences;
  if (seen.holds_segments) {
    return false;
  }
  return seen.in_segments == 0 || (seen.plain == 0 && seen.segments_left <= 1);
}

void Engine::post_if_complete(Unit& unit) {
  if (unit.pending == 0 && !unit.ready && unit.has_gradients() && may_post_early(unit)) {
    post(unit);
  }
}

void Engine::post(Unit& unit) {
  unit.ready = true;
  end_backward_span(unit.index());
  if (reduce_gradients) {
    start_ready_reductions();
  }
  if (!unit.is_root() && !unit.has_frozen() && !unit.pinned) {
    release(unit);
  }
  progress();
}

void Engine::inputs_done(int unit) {
  const nn::Unwatched unwatched;
  Unit& here = *units_[static_cast<std::size_t>(unit)];
  const bool later_use = here.occurrences.plain + here.occurrences.in_segments > 1;
  if (in_backward_ && !here.is_root() && !here.pinned && !later_use &&
      (here.ready || !here.has_trainable())) {
    release(here);
  }
}

void Engine::start_ready_reductions() {
  const double divisor =
      gradient_divisor > 0 ? gradient_divisor : static_cast<double>(parallel_.data_size);
  while (next_reduction_ < reduce_order_.size()) {
    Unit& unit = *units_[static_cast<std::size_t>(reduce_order_[next_reduction_])];
    if (unit.has_trainable()) {
      // What this rank skipped is complete, with zeros: peers that ran it may not get on without,
      // nor this rank without them.
      if (!unit.ready && !ran(unit)) {
        take_buffer(unit);
        unit.ready = true;
      }
      if (!unit.ready) {
        return;
      }
      const auto started = unit.start_reduce(
          *gradient_buffers_,
          *slices_,
          {.divisor = divisor,
           .cross = cross_replicas,
           .rest_in_buffer = static_cast<bool>(update_in_backward)}
      );
      reductions_.push_back(started);
      buckets_->post(*started);
    }
    ++next_reduction_;
  }
}

// Does this rank's part of what can be done now, oldest first, and never blocks.
void Engine::progress() {
  while (num_inside_done_ < reductions_.size() && advance_inside(/*block=*/false)) {
  }
  while (!reductions_.empty() && advance_front(/*block=*/false)) {
  }
  while (!unsharding_.empty() &&
         units_[static_cast<std::size_t>(unsharding_.front())]->advance_unshard()) {
    units_[static_cast<std::size_t>(unsharding_.front())]->finish_unshard();
    unsharding_.pop_front();
  }
}

// See NOTE [steps of a reduction].
bool Engine::advance_inside(bool block) {
  UnitReduction& next = *reductions_[num_inside_done_];
  const TraceSpan span(TraceLane::kWait, "reduce ", next.unit().path());
  if (block) {
    next.wait();
  } else if (!next.test()) {
    return false;
  }
  next.trace_inside();
  buckets_->cross(next);
  ++num_inside_done_;
  return true;
}

bool Engine::advance_front(bool block) {
  UnitReduction& oldest = *reductions_.front();
  while (oldest.step() <= UnitReduction::Step::kWaiting) {  // for others of its bucket, too
    if (!block) {
      return false;
    }
    advance_inside(block);
  }
  const TraceSpan span(TraceLane::kWait, "reduce ", oldest.unit().path());
  while (true) {
    if (block) {
      oldest.wait();
    } else if (!oldest.test()) {
      return false;
    }
    if (oldest.step() == UnitReduction::Step::kJoin) {
      break;
    }
    if (oldest.step() == UnitReduction::Step::kBetween) {
      oldest.start_plan();
    } else {
      oldest.start_join();
    }
  }
  oldest.finish();
  pop_reduction();
  return true;
}

void Engine::pop_reduction() {
  const std::shared_ptr<UnitReduction> done = std::move(reductions_.front());
  reductions_.pop_front();
  --num_inside_done_;
  done->trace_end();
  if (update_in_backward && reduces_over_all_axes()) {
    update_unit(done->unit());
  }
}

// Every rank has posted the unit, so nobody reads its parameters any more: what saves a parameter
// for backward runs before its AccumulateGrad node. New versions make a second graph over the old
// values an error of autograd's.
void Engine::update_unit(Unit& unit) {
  const TraceSpan span(TraceLane::kOptimizer, "update ", unit.path());
  update_in_backward(unit);
  for (const auto& group : unit.groups()) {
    group->drop_reduced();
    if (group->trainable()) {
      group->bump_versions();
    }
  }
  if (is_published_early(unit)) {
    publisher_->begin_early(unit.index());
  }
}

void Engine::finish_reduction(UnitReduction& reduction) {
  while (reduction.step() != UnitReduction::Step::kFinished) {
    advance_front(/*block=*/true);
  }
  reduction.wait_released();
}

void Engine::leave_buffer(UnitReduction& reduction) {
  while (reduction.step() == UnitReduction::Step::kInside) {
    advance_inside(/*block=*/true);
  }
  while (!reduction.has_left_buffer()) {
    advance_front(/*block=*/true);
  }
  reduction.wait_left();
}

void Engine::end_backward() {
  const nn::Unwatched unwatched;
  const ErrorContext context("end of backward");
  // Units that this rank skipped, or whose parameters were not all used: zeros where nothing was
  // written.
  for (const int index : reduce_order_) {
    Unit& unit = *units_[static_cast<std::size_t>(index)];
    if (unit.has_trainable() && !unit.ready) {
      take_buffer(unit);
      unit.ready = true;
    }
    if (reduce_gradients) {
      start_ready_reductions();
    }
  }
  start_up_to(pass_order_.size());
  const std::int64_t start = now_ns();
  while (!reductions_.empty()) {
    advance_front(/*block=*/true);
  }
  counters_.reduce_wait_ns += now_ns() - start;
  end_backward_span(backward_unit_);
  backward_unit_ = -1;
  units_.front()->backward_span.end(TraceLane::kCompute, "backward ", units_.front()->path());
  for (const auto& unit : units_) {
    if (!unit->pinned) {
      release(*unit);
    }
    unit->occurrences = {};
    unit->used = false;
  }
  in_backward_ = false;
  pass_ = Pass::kNone;
  if (reduces_over_all_axes()) {
    needs_publish_ = true;
    may_update_ = true;
    open_window();
    versions_after_backward_ = update_versions();
  }
}

// Otherwise gradients are not at rest yet, and a step would find none.
bool Engine::reduces_over_all_axes() const {
  const auto is_outer = [this](const DataAxis& axis) {
    return axis.name == parallel_.replicate_axis && axis.size > 1;
  };
  const auto levels = parallel_.cuts.begin() + parallel_.gradient_levels;
  const bool has_outer = std::any_of(parallel_.cuts.begin(), levels, is_outer) ||
                         std::any_of(parallel_.summed.begin(), parallel_.summed.end(), is_outer);
  return reduce_gradients && (cross_replicas || !has_outer);
}

// A bucket that lacks a unit will not be full any more.
void Engine::abandon_front() {
  UnitReduction& oldest = *reductions_.front();
  if (!oldest.held_up()) {
    advance_front(/*block=*/true);
    return;
  }
  while (oldest.step() == UnitReduction::Step::kInside) {
    advance_inside(/*block=*/true);
  }
  reductions_.pop_front();
  --num_inside_done_;
}

// A version of a frozen parameter's would be a change of what backward may have saved.
bool Engine::is_published_early(const Unit& unit) const {
  return publishes_in_backward_ && early_units_[static_cast<std::size_t>(unit.index())] &&
         !unit.has_frozen();
}

// How many units a rank had updated when the backward failed is a matter of timing; what it gathers
// must not be.
void Engine::publish_rest_early() {
  for (const int index : reduce_order_) {
    if (is_published_early(*units_[static_cast<std::size_t>(index)]) &&
        !publisher_->is_early(index)) {
      publisher_->begin_early(index);
    }
  }
  versions_after_backward_ = update_versions();
}

// After an exception. Gradients kept from earlier micro-batches survive a failed forward; a failed
// backward has half-written them.
void Engine::reset_iteration() {
  if (in_backward_) {
    // How many of the posted ones were updated is a rank's own matter, and their owners others'.
    if (updates_in_backward_) {
      torn_units_ = std::max(torn_units_, static_cast<int>(next_reduction_));
    }
    // What is in flight would otherwise come to rest among the gradients of the next backward; no
    // unit is updated with it.
    const auto update = std::exchange(update_in_backward, nullptr);
    while (!reductions_.empty()) {
      abandon_front();
    }
    update_in_backward = update;
    drop_gradients();
  }
  for (const auto& unit : units_) {
    unit->occurrences = {};
    unit->used = false;
    unit->ready = false;
    unit->reduced = false;
    if (!unit->pinned) {
      release(*unit);
    }
  }
  if (in_backward_) {
    publish_rest_early();  // what is gathered to be made whole must not change
  }
  stack_.clear();
  forward_spans_.clear();
  backward_unit_ = -1;
  in_backward_ = false;
  pass_ = Pass::kNone;
}

}  // namespace hypershard::shard
