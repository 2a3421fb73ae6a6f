// See engine.h: parameter hooks, the write window and what is done by hand. Units are built in
// engine_build.cpp; passes are in engine_forward.cpp and engine_backward.cpp.
#include "hypershard/shard/engine.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "hypershard/core/clock.h"
#include "hypershard/core/error.h"
#include "hypershard/core/trace.h"
#include "hypershard/nn/gradient_slot.h"
#include "hypershard/shard/internal/autograd_hooks.h"
#include "hypershard/shard/internal/engine_observers.h"

namespace hypershard::shard {

Engine::Engine(DataParallel parallel, FullyShardOptions options, std::vector<UnitSpec> specs)
    : parallel_(std::move(parallel)),
      options_(std::move(options)),
      pool_(&counters_, options_.reshard_debug == ReshardDebug::kNan) {
  HS_CHECK_GE(options_.forward_prefetch, 0, "shard: forward_prefetch counts units");
  HS_CHECK_GE(options_.backward_prefetch, 0, "shard: backward_prefetch counts units");
  HS_CHECK_GE(options_.bucket_bytes.value_or(0), 0, "shard: bucket_bytes is a size");
  build_units(std::move(specs));
  place_groups();
  agree_on_buffer_sizes();
  make_buckets();
  make_gradient_buffers();
  // Until a forward is recorded: order of declaration, the root around all others.
  std::vector<int> begins(units_.size());
  std::iota(begins.begin(), begins.end(), 0);
  std::vector<int> ends(begins.begin() + 1, begins.end());
  ends.push_back(0);
  set_order(begins, ends);
  seen_versions_ = update_versions();
}

Engine::~Engine() = default;

// Runs once a root forward: requires_grad is the user's to change between iterations.
void Engine::refresh_trainability() {
  if (segment_observers_.empty()) {
    for (const auto& each : units_) {
      segment_observers_.push_back(
          std::make_shared<internal::SegmentObserver>(weak_from_this(), each->index())
      );
      events_.push_back(
          {.pre_backward = event(each->index(), &Engine::pre_backward),
           .inputs_done = event(each->index(), &Engine::inputs_done)}
      );
    }
  }
  renew_tombstones();
  for (const auto& unit : units_) {
    for (std::size_t g = 0; g < unit->groups().size(); ++g) {
      ParamGroup& group = *unit->groups()[g];
      const bool first = group.params().front().tensor.requires_grad();
      for (const LogicalParam& param : group.params()) {
        HS_CHECK(
            param.tensor.requires_grad() == first,
            "shard: requires_grad of parameter '",
            param.name,
            "' is ",
            !first,
            " but '",
            group.params().front().name,
            "' of the same group '",
            group.name(),
            "' has ",
            first,
            HS_HINT("freeze or unfreeze the parameters of a group together; parameters frozen "
                    "before fully_shard get a group of their own")
        );
      }
      group.set_trainable(first);
      if (first && !group.gradients_hooked) {
        hook_parameters(*unit, g);
        group.gradients_hooked = true;
      }
    }
  }
}

std::shared_ptr<const std::function<void()>> Engine::event(int unit, void (Engine::*method)(int)) {
  return std::make_shared<const std::function<void()>>([self = weak_from_this(), unit, method] {
    if (const auto engine = self.lock()) {
      (engine.get()->*method)(unit);
    }
  });
}

void Engine::hook_parameters(Unit& unit, std::size_t group) {
  const std::vector<LogicalParam>& params = unit.groups()[group]->params();
  const std::weak_ptr<Engine> self = weak_from_this();
  for (std::size_t i = 0; i < params.size(); ++i) {
    gradient_hooks_.push_back(internal::take_gradients_of(
        params[i].tensor,
        [self, u = unit.index(), group, i](const at::Tensor& gradient) {
          if (const auto engine = self.lock()) {
            engine->gradient_ready(u, group, i, gradient);
          }
        }
    ));
    auto slot = std::make_shared<internal::EngineSlot>(self, unit.index(), group, i);
    nn::set_gradient_slot(params[i].tensor, slot);  // refers to it weakly
    gradient_hooks_.push_back(std::move(slot));
    // Whoever steps on the module's parameters instead of the update parameters meets this text.
    at::Tensor tensor = params[i].tensor;
    at::Tensor tombstone = make_tombstone(
        params[i].shape,
        unit.groups()[group]->dtypes().compute,
        "hypershard: the gradient of runtime parameter '" + params[i].name +
            "' was accessed; gradients belong to the update parameters. Build the optimizer (and "
            "clip) over update_parameters() of the sharded model, not over the "
            "module's parameters()"
    );
    tensor.mutable_grad() = tombstone;
    tombstones_.push_back({std::move(tensor), std::move(tombstone)});
  }
}

// The module's own zero_grad() drops the tombstones, and means what it says: no gradient is left.
// An optimizer over the module's parameters drops some or all as well, and must meet them again.
void Engine::renew_tombstones() {
  std::size_t num_gone = 0;
  for (Tombstone& each : tombstones_) {
    if (!each.parameter.grad().defined()) {
      each.parameter.mutable_grad() = each.gradient;
      ++num_gone;
    }
  }
  if (num_gone > 0 && num_gone == tombstones_.size()) {
    drop_gradients();
  }
}

std::uint64_t Engine::update_versions() const {
  std::uint64_t sum = 0;
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups()) {
      sum += group->update_version();
    }
  }
  return sum;
}

void Engine::open_window() {
  if (!window_open_) {
    publisher_->release();
    start_gathers();
  }
  if (epochs_ && !window_open_) {
    const TraceSpan span(TraceLane::kWait, "write window");
    const std::int64_t began = now_ns();
    epochs_->publish(kReleasedRow, ++released_epoch_);
    epochs_->wait_all(kReleasedRow, released_epoch_, "release of runtime parameters", "root");
    counters_.window_wait_ns += now_ns() - began;
  }
  window_open_ = true;
}

// `keep` leaves the publish due: an evaluation may come before the optimizer's step, and not every
// step shows in version counters (torch's SGD writes through data()).
void Engine::close_window(bool keep) {
  const std::uint64_t versions = update_versions();
  const bool written = needs_publish_ || versions != seen_versions_;
  HS_CHECK(
      window_open_ || versions == seen_versions_,
      "shard: update parameters were written while runtime parameters may be read: between a "
      "forward with gradients and the end of its backward",
      HS_HINT("step the optimizer after backward, or call sync_runtime() on every rank after "
              "writing update parameters by hand")
  );
  if (!window_open_) {
    return;
  }
  HS_CHECK(
      !publisher_->has_early() || versions == versions_after_backward_,
      "shard: update parameters were written after a backward that had updated them, and had "
      "published some of them already",
      HS_HINT("call sync_runtime() on every rank after writing update parameters by hand")
  );
  if (written && !publish_frozen_) {
    for (const auto& unit : units_) {
      for (const auto& group : unit->groups()) {
        group->check_frozen();
      }
    }
  }
  {
    const TraceSpan span(TraceLane::kPublish, "publish");
    const std::int64_t began = now_ns();
    if (written) {
      for (const auto& unit : units_) {
        release(*unit);
      }
    }
    publisher_->begin(
        {reduce_order_.rbegin(), reduce_order_.rend()}, written, /*even_frozen=*/publish_frozen_
    );
    publish_frozen_ = false;
    counters_.publish_ns += now_ns() - began;
  }
  window_open_ = false;
  needs_publish_ = needs_publish_ && keep;
  seen_versions_ = versions;
  for (const auto& unit : units_) {
    if (unit->pinned) {
      start(*unit);
      finish(unit->index());
      publisher_->await(*unit);
    }
  }
}

// After an exception the engine is between steps again, once neither pass runs any more.
void Engine::recover() {
  const bool is_broken_off = in_backward_ || pass_ != Pass::kNone;
  if (is_broken_off && stack_.empty() && !internal::backward_is_running()) {
    reset_iteration();
    may_update_ = true;
    open_window();
  }
}

void Engine::begin_gather() {
  recover();
  HS_CHECK(
      !in_backward_ || !publishes_in_backward_,
      "shard: full parameters and gradients cannot be gathered in a backward that updates and "
      "publishes units",
      HS_HINT("gather them between steps, or call step_in_backward(false) on the optimizer")
  );
  finish_publishes();
}

void Engine::finish_publishes() {
  publisher_->await_all();
  start_gathers();
}

void Engine::discard_gradients() {
  recover();
  HS_CHECK(!in_backward_, "shard: zero_grad() was called during a backward; call it between steps");
  drop_gradients();
}

void Engine::drop_gradients() {
  for (const auto& unit : units_) {
    unit->forget_gradients(*gradient_buffers_);
    for (const auto& group : unit->groups()) {
      group->drop_reduced();
    }
  }
}

void Engine::sync_runtime() {
  recover();
  HS_CHECK(
      stack_.empty() && !in_backward_,
      "shard: sync_runtime() was called during a forward or backward; call it between steps"
  );
  torn_units_ = 0;
  open_window();
  may_update_ = true;
  needs_publish_ = true;
  publish_frozen_ = true;
  publisher_->forget_early();
  close_window(/*keep=*/false);
  open_window();
}

void Engine::begin_update() {
  recover();
  HS_CHECK(
      stack_.empty() && !in_backward_ && window_open_ && may_update_,
      "shard: update parameters may not be written now: a forward with gradients ran and its "
      "backward has not ended with a reduction",
      HS_HINT("run backward with gradient reduction on, over all axes, before the optimizer's "
              "step; the last micro-batch of an accumulation reduces")
  );
}

void Engine::unshard(int unit) {
  recover();
  Unit& target = *units_[static_cast<std::size_t>(unit)];
  if (stack_.empty() && !in_backward_) {
    close_window(/*keep=*/true);
  }
  target.pinned = true;
  start(target);
  finish(unit);
  publisher_->await(target);
}

void Engine::reshard(int unit) {
  Unit& target = *units_[static_cast<std::size_t>(unit)];
  target.pinned = false;
  release(target);
  const bool is_read =
      std::any_of(units_.begin(), units_.end(), [](const auto& each) { return each->pinned; });
  if (stack_.empty() && !in_backward_ && !is_read) {
    open_window();  // reading by hand is over
  }
}

}  // namespace hypershard::shard
