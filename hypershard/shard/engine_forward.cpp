// The forward half of the engine: which units are made whole when, and the hooks that let backward
// find them.
#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>

#include "hypershard/core/clock.h"
#include "hypershard/core/error.h"
#include "hypershard/core/log.h"
#include "hypershard/core/trace.h"
#include "hypershard/nn/watched_operators.h"
#include "hypershard/shard/engine.h"
#include "hypershard/shard/internal/agreement.h"
#include "hypershard/shard/internal/autograd_hooks.h"

namespace hypershard::shard {

namespace {

bool is_training() {
  return at::GradMode::is_enabled() || nn::current_recompute_segment() != nullptr;
}

}  // namespace

void Engine::pre_forward(int unit, std::span<at::Tensor* const> inputs) {
  const ErrorContext context("forward");
  const ErrorContext unit_context(units_[static_cast<std::size_t>(unit)]->path());
  if (stack_.empty() && !(in_backward_ && internal::backward_is_running())) {
    begin_forward(unit);
  }
  Unit& here = *units_[static_cast<std::size_t>(unit)];
  here.used = true;
  if (pass_ == Pass::kForward) {
    recording_.push_back(unit);
  }
  need(unit);
  stack_.push_back(unit);
  forward_spans_.emplace_back().begin();
  if (pass_ == Pass::kForward && is_training()) {
    if (nn::RecomputeSegment* segment = nn::current_recompute_segment()) {
      ++here.occurrences.in_segments;
      ++here.occurrences.segments_left;
      segment->add_observer(segment_observers_[static_cast<std::size_t>(unit)]);
    }
    here.occurrences.segment_marks.push_back(nn::num_recompute_segments());
  }
  cast_inputs(here, inputs);
  hook_inputs(unit, inputs);
}

void Engine::begin_forward(int unit) {
  const nn::Unwatched unwatched;
  if (in_backward_ || pass_ != Pass::kNone) {
    reset_iteration();  // an exception ended the last one
    if (torn_units_ > 0 || publisher_->has_early()) {
      may_update_ = true;
      open_window();
    }
  }
  HS_CHECK(
      uninitialised_.empty(),
      "shard: ",
      uninitialised_.size(),
      " parameters were built on the meta device and have no values, the first is '",
      uninitialised_.empty() ? std::string() : uninitialised_.front(),
      "'",
      HS_HINT("call initialize(...) or load a checkpoint before the first forward")
  );
  HS_CHECK(
      torn_units_ == 0,
      "shard: a backward failed when the gradients of ",
      torn_units_,
      " of ",
      units_.size(),
      " units were on their way to an optimizer that steps in backward: the weights are a mix of "
      "two steps",
      HS_HINT("load a checkpoint (or give the weights new values and call sync_runtime()); with "
              "step_in_backward off a failed backward changes no weight")
  );
  if (is_training()) {
    refresh_trainability();
  }
  close_window(/*keep=*/!is_training());
  may_update_ = may_update_ && !is_training();
  pass_ = Pass::kForward;
  root_pass_ = unit == 0;
  training_pass_ = is_training();
  pass_order_ = root_pass_ ? order_ : std::vector<int>();
  started_ = 0;
  recording_.clear();
  recording_ends_.clear();
}

// See NOTE [order of collectives].
void Engine::start_up_to(std::size_t end) {
  const std::size_t last = std::min(end, pass_order_.size());
  for (std::size_t i = started_; i < last; ++i) {
    start(*units_[static_cast<std::size_t>(pass_order_[i])]);
  }
}

void Engine::start(Unit& unit) {
  if (unit.state() == UnitState::kSharded && !is_unsharding(unit.index())) {
    unit.prefetched = true;
    unsharding_.push_back(unit.index());
    start_gathers();
  }
}

bool Engine::is_unsharding(int unit) const {
  return std::find(unsharding_.begin(), unsharding_.end(), unit) != unsharding_.end();
}

// What a unit gathers must have been published; and no unit overtakes another, whatever the timing.
void Engine::start_gathers() {
  for (const int index : unsharding_) {
    Unit& unit = *units_[static_cast<std::size_t>(index)];
    if (unit.state() == UnitState::kSharded) {
      if (!publisher_->has_arrived(unit)) {
        return;
      }
      unit.start_unshard();
    }
  }
}

void Engine::need(int unit) {
  const nn::Unwatched unwatched;
  Unit& target = *units_[static_cast<std::size_t>(unit)];
  if (target.state() == UnitState::kUnsharded && !target.prefetched) {
    publisher_->await(target);
    return;  // kept since earlier, on all ranks alike: no entry of the order
  }
  const auto from = pass_order_.begin() + static_cast<std::ptrdiff_t>(started_);
  const auto found = std::find(from, pass_order_.end(), unit);
  if (found != pass_order_.end()) {
    const auto position = static_cast<std::size_t>(found - pass_order_.begin());
    start_up_to(position + 1);
    started_ = position + 1;
  } else {
    start(target);
  }
  target.prefetched = false;
  finish(unit);
  publisher_->await(target);
  const int ahead =
      pass_ == Pass::kForward ? options_.forward_prefetch : options_.backward_prefetch;
  start_up_to(started_ + static_cast<std::size_t>(ahead));
  publisher_->advance();
  start_gathers();
}

// Oldest first, also through units that nobody waits for yet: later stages of a gather must start
// in the same order on all ranks.
void Engine::finish(int unit) {
  Unit& target = *units_[static_cast<std::size_t>(unit)];
  if (target.state() == UnitState::kUnsharded && !target.prefetched) {
    return;  // kept since earlier, on all ranks alike: no entry of the order
  }
  const TraceSpan span(
      TraceLane::kWait, "unshard ", units_[static_cast<std::size_t>(unit)]->path()
  );
  const std::int64_t begin = now_ns();
  const std::int64_t published = counters_.publish_wait_ns;
  while (is_unsharding(unit)) {
    Unit& oldest = *units_[static_cast<std::size_t>(unsharding_.front())];
    publisher_->await_own_part(oldest);
    start_gathers();
    oldest.finish_unshard();
    unsharding_.pop_front();
  }
  counters_.unshard_wait_ns += now_ns() - begin - (counters_.publish_wait_ns - published);
}

void Engine::release(Unit& unit) {
  const nn::Unwatched unwatched;
  if (is_unsharding(unit.index())) {
    finish(unit.index());  // a prefetch nobody used
  }
  unit.prefetched = false;
  unit.reshard();
}

void Engine::cast_inputs(const Unit& unit, std::span<at::Tensor* const> inputs) const {
  if (!options_.precision.compute || !options_.precision.cast_inputs) {
    return;
  }
  for (at::Tensor* input : inputs) {
    if (input->defined() && input->is_floating_point() &&
        input->scalar_type() != *options_.precision.compute) {
      HS_ASSERT(unit.index() >= 0);
      *input = input->to(*options_.precision.compute);
    }
  }
}

// A unit with frozen parameters may still read them when its last gradient has come; it is done
// when its inputs' gradients are complete.
void Engine::hook_inputs(int unit, std::span<at::Tensor* const> inputs) {
  if (pass_ != Pass::kForward || !at::GradMode::is_enabled() ||
      !units_[static_cast<std::size_t>(unit)]->has_frozen()) {
    return;
  }
  for (at::Tensor* input : inputs) {
    internal::before_backward_of(*input, events_[static_cast<std::size_t>(unit)].inputs_done);
  }
}

void Engine::hook_outputs(int unit, std::span<at::Tensor* const> outputs) {
  if (!at::GradMode::is_enabled()) {
    return;
  }
  for (at::Tensor* output : outputs) {
    internal::before_backward_of(*output, events_[static_cast<std::size_t>(unit)].pre_backward);
  }
}

void Engine::post_forward(int unit, std::span<at::Tensor* const> outputs) {
  const ErrorContext context("forward");
  const ErrorContext unit_context(units_[static_cast<std::size_t>(unit)]->path());
  Unit& here = *units_[static_cast<std::size_t>(unit)];
  HS_ASSERT(
      !stack_.empty() && stack_.back() == unit,
      "shard: forward of unit '",
      here.path(),
      "' ended out of turn"
  );
  stack_.pop_back();
  forward_spans_.back().end(TraceLane::kCompute, "forward ", here.path());
  forward_spans_.pop_back();
  if (pass_ == Pass::kForward) {
    recording_ends_.push_back(unit);
  }
  if (here.is_root() && options_.precision.output) {
    for (at::Tensor* output : outputs) {
      if (output->defined() && output->is_floating_point()) {
        *output = output->to(*options_.precision.output);
      }
    }
  }
  hook_outputs(unit, outputs);
  if (pass_ == Pass::kBackward) {
    return;  // a recompute: its backward follows at once
  }
  if (is_training()) {
    Occurrences& seen = here.occurrences;
    seen.holds_segments =
        seen.holds_segments || nn::num_recompute_segments() != seen.segment_marks.back();
    seen.segment_marks.pop_back();
    seen.plain += nn::current_recompute_segment() == nullptr ? 1 : 0;
  }
  const bool running = std::find(stack_.begin(), stack_.end(), unit) != stack_.end();
  if (here.reshard_after_forward && !here.pinned && !running) {
    release(here);
  }
  if (stack_.empty()) {
    end_forward();
  }
}

void Engine::end_forward() {
  const nn::Unwatched unwatched;
  // Units that this rank skipped: start them all the same, their peers may have waited for that.
  start_up_to(pass_order_.size());
  for (const int index : pass_order_) {
    Unit& unit = *units_[static_cast<std::size_t>(index)];
    if (!unit.used && unit.reshard_after_forward && !unit.pinned) {
      release(unit);
    }
  }
  finish_publishes();
  for (const auto& unit : units_) {
    unit->used = false;
  }
  if (training_pass_ && root_pass_ && !order_agreed_) {
    agree_on_order();
  }
  pass_ = Pass::kNone;
  if (!training_pass_) {
    open_window();
  }
}

void Engine::forward_failed() noexcept {
  // Seen by the outermost unit last; the next root forward starts afresh.
  if (!stack_.empty()) {
    stack_.pop_back();
    forward_spans_.pop_back();
  }
}

void Engine::agree_on_order() {
  std::vector<int> both = recording_;
  both.insert(both.end(), recording_ends_.begin(), recording_ends_.end());
  if (internal::equal_on_all_ranks(parallel_, internal::order_signature(both))) {
    set_order(recording_, recording_ends_);
  } else {
    HS_LOG_DEBUG(
        "shard: ranks ran their units in different orders; collectives keep the order of "
        "declaration"
    );
  }
  order_agreed_ = true;
}

// Backward needs a unit when the last of its forward is undone, and completes it when the first is.
// Units that did not run come last: some rank may run them later, and then all must gather them.
void Engine::set_order(const std::vector<int>& begins, const std::vector<int>& ends) {
  order_ = begins;
  backward_order_.assign(ends.rbegin(), ends.rend());
  for (const auto& unit : units_) {
    if (std::find(begins.begin(), begins.end(), unit->index()) == begins.end()) {
      order_.push_back(unit->index());
      backward_order_.push_back(unit->index());
    }
  }
  reduce_order_.clear();
  const auto append = [this](int unit) {
    if (std::find(reduce_order_.begin(), reduce_order_.end(), unit) == reduce_order_.end()) {
      reduce_order_.push_back(unit);
    }
  };
  std::for_each(begins.begin(), begins.end(), append);
  for (const auto& unit : units_) {
    append(unit->index());
  }
  std::reverse(reduce_order_.begin(), reduce_order_.end());
  plan_early_publishes();
}

// Gradients and parameters share the link, and a backward lasts about twice as long as a forward:
// so many units are published in it that the link has two thirds of its bytes there. They are
// spread over it, as the gaps between gradients are. Neither the end of the forward is among them
// (the link would stand still until the next gradient) nor its begin, whose gradients come last and
// are waited for. See NOTE [early publishes].
void Engine::plan_early_publishes() {
  constexpr double kBackwardShare = 2.0 / 3;
  constexpr double kUntil = 3.0 / 4;  // of the parameters, in the order of backward
  early_units_.assign(units_.size(), false);
  if (!publisher_->may_start_early()) {
    return;
  }
  double gradients = 0;
  double parameters = 0;
  for (const auto& unit : units_) {
    if (!unit->has_frozen()) {
      gradients += static_cast<double>(unit->crossing_bytes());
      parameters += static_cast<double>(unit->publish_bytes());
    }
  }
  const double early = kBackwardShare * (gradients + parameters) - gradients;
  double passed = 0;
  double room = 0;
  for (const int index : reduce_order_) {
    const Unit& unit = *units_[static_cast<std::size_t>(index)];
    const auto bytes = static_cast<double>(unit.publish_bytes());
    const bool is_last_of_forward = passed == 0;
    passed += bytes;
    room += early / parameters * bytes;
    if (passed > kUntil * parameters) {
      return;
    }
    if (!is_last_of_forward && bytes > 0 && room >= bytes / 2 && !unit.has_frozen()) {
      room -= bytes;
      early_units_[static_cast<std::size_t>(index)] = true;
    }
  }
}

}  // namespace hypershard::shard
