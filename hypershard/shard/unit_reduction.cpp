// See unit_reduction.h.
#include "hypershard/shard/unit_reduction.h"

#include <algorithm>
#include <utility>

#include "hypershard/shard/group.h"
#include "hypershard/shard/unit.h"

namespace hypershard::shard {

void UnitReduction::start_inside() {
  for (GroupReduction& each : groups_) {
    each.group->sum_inside(each);
  }
}

void UnitReduction::inside_done() {
  keep_works();
  step_ = Step::kWaiting;
}

void UnitReduction::start_plan() {
  keep_works();
  for (GroupReduction& each : groups_) {
    each.group->sum_plan(each);
  }
  step_ = Step::kPlan;
}

void UnitReduction::start_join() {
  keep_works();
  for (GroupReduction& each : groups_) {
    each.group->join_inside(each);
  }
  step_ = Step::kJoin;
}

void UnitReduction::finish() {
  keep_works();
  for (GroupReduction& each : groups_) {
    each.group->rest(each);
  }
  step_ = Step::kFinished;
}

bool UnitReduction::sums_between() const {
  return std::any_of(groups_.begin(), groups_.end(), [](const GroupReduction& each) {
    return each.group->crosses(each);
  });
}

void UnitReduction::trace_inside() {
  if (!trace_enabled()) {
    return;
  }
  flow_ = sums_between() ? next_trace_flow() : 0;
  span_.end(
      TraceLane::kReduce, "reduce ", unit_->path(), {.to = flow_, .from = unit_->backward_flow}
  );
  if (flow_ != 0) {
    span_.begin();
  }
}

void UnitReduction::trace_end() {
  span_.end(TraceLane::kBetween, "reduce ", unit_->path(), {.from = flow_});
}

bool UnitReduction::test() {
  return std::all_of(groups_.begin(), groups_.end(), [](const GroupReduction& each) {
    return !each.work || each.work->test();
  });
}

void UnitReduction::wait() {
  for (const GroupReduction& each : groups_) {
    if (each.work) {
      each.work->wait();
    }
  }
}

void UnitReduction::keep_works() {
  for (GroupReduction& each : groups_) {
    if (each.work) {
      (step_ == Step::kInside ? read_inside_ : read_).push_back(std::move(each.work));
      each.work = nullptr;
    }
  }
}

bool UnitReduction::leaves_early() const {
  return std::all_of(groups_.begin(), groups_.end(), [](const GroupReduction& each) {
    return each.group->leaves_early(each);
  });
}

bool UnitReduction::has_left_buffer() const {
  return step_ == Step::kFinished || (step_ != Step::kInside && leaves_early());
}

void UnitReduction::wait_released() {
  for (auto* works : {&read_inside_, &read_}) {
    for (const comm::WorkPtr& work : *works) {
      work->wait_released();
    }
    works->clear();
  }
}

void UnitReduction::wait_left() {
  if (!leaves_early()) {
    wait_released();
    return;
  }
  for (const comm::WorkPtr& work : read_inside_) {
    work->wait_released();
  }
  read_inside_.clear();
}

}  // namespace hypershard::shard
