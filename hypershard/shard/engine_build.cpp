// How an engine comes to its units: parameters into groups, groups into memory.
#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include "hypershard/comm/link.h"
#include "hypershard/core/error.h"
#include "hypershard/layout/bucket.h"
#include "hypershard/shard/engine.h"
#include "hypershard/shard/internal/agreement.h"

namespace hypershard::shard {

namespace {

// Parameters that may share a group, in order of first appearance.
std::vector<std::vector<UnitParam>> split_in_groups(std::vector<UnitParam> params) {
  std::vector<std::vector<UnitParam>> groups;
  for (UnitParam& param : params) {
    const auto same = [&](const std::vector<UnitParam>& group) {
      const LogicalParam& first = group.front().param;
      return group.front().dtypes == param.dtypes &&
             first.tensor.requires_grad() == param.param.tensor.requires_grad() &&
             first.part.reduce_axes == param.param.part.reduce_axes;
    };
    auto at = std::find_if(groups.begin(), groups.end(), same);
    if (at == groups.end()) {
      groups.emplace_back();
      at = groups.end() - 1;
    }
    at->push_back(std::move(param));
  }
  return groups;
}

std::string group_name(const std::string& unit, std::size_t index, std::size_t count) {
  return count == 1 ? unit : unit + "#" + std::to_string(index);
}

// What a bucket may lose to the link's latency.
constexpr double kLatencyShare = 0.1;

std::int64_t measured_bucket_bytes(comm::Communicator& link) {
  if (!link.backend().starts_with("c10d")) {
    return layout::kBucketOfOne;  // ranks of one process, or none: what would be measured is no
                                  // link
  }
  const comm::LinkSpeed speed = comm::measure_link(link);
  return layout::smallest_bucket_bytes(
      speed.latency_s, speed.bytes_per_s, link.size(), kLatencyShare
  );
}

std::int64_t largest_of_all(const DataParallel& parallel, std::int64_t own) {
  std::int64_t largest = own;
  for (comm::Communicator* ranks : {parallel.control.get(), parallel.plan.get()}) {
    if (ranks != nullptr) {
      const at::Tensor mine = at::full({1}, largest, at::TensorOptions().dtype(at::kLong));
      largest = internal::gather_rows(*ranks, mine).max().item<std::int64_t>();
    }
  }
  return largest;
}

std::vector<layout::Bucket> buckets_of_one(std::size_t num_units) {
  std::vector<layout::Bucket> buckets;
  for (int unit = 0; unit < static_cast<int>(num_units); ++unit) {
    buckets.push_back({.begin = unit, .end = unit + 1});
  }
  return buckets;
}

}  // namespace

void Engine::build_units(std::vector<UnitSpec> specs) {
  for (std::size_t u = 0; u < specs.size(); ++u) {
    const std::string path = specs[u].path.empty() ? "root" : specs[u].path;
    std::vector<std::vector<UnitParam>> split = split_in_groups(std::move(specs[u].params));
    std::vector<std::unique_ptr<ParamGroup>> groups;
    for (std::size_t g = 0; g < split.size(); ++g) {
      std::vector<LogicalParam> params;
      for (UnitParam& param : split[g]) {
        if (param.param.on_meta) {
          uninitialised_.push_back(param.param.name);
        }
        params.push_back(std::move(param.param));
      }
      const bool trainable = params.front().tensor.requires_grad();
      groups.push_back(std::make_unique<ParamGroup>(
          group_name(path, g, split.size()),
          path,
          std::move(params),
          split[g].front().dtypes,
          trainable,
          &parallel_,
          &counters_
      ));
    }
    units_.push_back(std::make_unique<Unit>(
        static_cast<int>(u), path, u == 0, std::move(groups), &pool_, &counters_
    ));
    units_.back()->reshard_after_forward = options_.reshard_after_forward && u != 0;
  }
}

void Engine::place_groups() {
  std::int64_t shared_bytes = 0;
  std::vector<RuntimeMode> modes;
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups()) {
      std::string why_not;
      modes.push_back(ParamGroup::choose_mode(
          parallel_, group->dtypes(), options_.share != Share::kOff, &why_not
      ));
      HS_SUPPORTED(
          options_.share != Share::kOn || why_not.empty(),
          "shard: share = on, but the runtime buffer of group '",
          group->name(),
          "' cannot be shared: ",
          why_not,
          HS_HINT("use share = auto to gather where memory cannot be shared")
      );
      if (modes.back() == RuntimeMode::kShared) {
        shared_bytes += align_bytes(group->whole_storage_bytes());
      }
      why_not_shared_ = why_not_shared_.empty() ? why_not : why_not_shared_;
    }
  }
  if (shared_bytes > 0) {
    comm::Communicator& ranks = *parallel_.cuts.front().gather;
    shared_ = ranks.allocate_shared(shared_bytes, "runtime parameters");
    epochs_ = ranks.make_epoch_board(
        published_row(static_cast<int>(units_.size())), "runtime parameters"
    );
  }
  std::int64_t at = 0;
  std::size_t next = 0;
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups()) {
      const RuntimeMode mode = modes[next++];
      if (mode == RuntimeMode::kShared) {
        group->place(mode, shared_->read() + at, shared_->write() + at, shared_);
        at += align_bytes(group->whole_storage_bytes());
      } else {
        group->place(mode, nullptr, nullptr, nullptr);
      }
    }
  }
  make_shared_pool();
  publisher_ = std::make_unique<Publisher>(&units_, parallel_, epochs_, &counters_);
}

void Engine::make_shared_pool() {
  std::vector<std::int64_t> unit_bytes;
  for (const auto& unit : units_) {
    unit_bytes.push_back(unit->whole_bytes(RuntimeMode::kPooled));
  }
  if (std::all_of(unit_bytes.begin(), unit_bytes.end(), [](std::int64_t b) { return b == 0; })) {
    return;
  }
  shared_pool_ = std::make_unique<SharedUnitPool>(
      *parallel_.cuts.front().gather,
      unit_bytes,
      &counters_,
      options_.reshard_debug == ReshardDebug::kNan
  );
  for (const auto& unit : units_) {
    unit->set_shared_pool(shared_pool_.get());
  }
}

// Which reductions a rank waits for before it fills a buffer must not depend on how much of a unit
// it holds: it would wait while a peer of the plan axes waits for it.
void Engine::agree_on_buffer_sizes() {
  std::vector<ParamGroup*> groups;
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups()) {
      groups.push_back(group.get());
    }
  }
  if (!parallel_.plan || groups.empty()) {
    return;
  }
  const auto count = static_cast<std::int64_t>(groups.size());
  const at::Tensor mine = at::empty({count}, at::TensorOptions().dtype(at::kLong));
  for (std::int64_t i = 0; i < count; ++i) {
    mine.mutable_data_ptr<std::int64_t>()[i] = groups[static_cast<std::size_t>(i)]->packing().numel;
  }
  const at::Tensor all = internal::gather_rows(*parallel_.plan, mine);
  const auto* rows = all.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < count; ++i) {
    std::int64_t largest = 0;
    for (int r = 0; r < parallel_.plan->size(); ++r) {
      largest = std::max(largest, rows[r * count + i]);
    }
    groups[static_cast<std::size_t>(i)]->set_gradient_buffer_numel(largest);
  }
}

// Sizes are those that ranks of the plan axes have agreed on, so that all of them cross alike.
void Engine::make_buckets() {
  std::vector<std::int64_t> unit_bytes;
  comm::Communicator* link = nullptr;
  for (const auto& axes : {parallel_.cuts, parallel_.summed}) {
    for (const DataAxis& axis : axes) {
      link = axis.name == parallel_.replicate_axis && axis.size > 1 ? axis.reduce.get() : link;
    }
  }
  for (const auto& unit : units_) {
    unit_bytes.push_back(unit->crossing_bytes());
  }
  std::int64_t target = options_.bucket_bytes.value_or(layout::kBucketOfOne);
  if (link != nullptr && !options_.bucket_bytes) {
    target = largest_of_all(parallel_, measured_bucket_bytes(*link));
  }
  buckets_ = std::make_unique<Buckets>(
      units_,
      link == nullptr ? buckets_of_one(units_.size()) : layout::make_buckets(unit_bytes, target)
  );
}

// A unit is written to, the units of a bucket wait for one another, and two buckets are on the
// link: more need not be held.
int Engine::slice_depth() const {
  const bool crosses = std::any_of(units_.begin(), units_.end(), [](const auto& unit) {
    return unit->crossing_bytes() > 0;
  });
  return options_.gradient_buffers + (crosses ? 2 * buckets_->most_units() : 0);
}

// Where sums inside the supernode have memory of their own, that holds what is on the link.
int Engine::gradient_buffer_depth() const {
  const bool has_slices = std::any_of(units_.begin(), units_.end(), [](const auto& unit) {
    return unit->slice_bytes({.rest_in_buffer = true}) > 0;
  });
  return has_slices ? options_.gradient_buffers : slice_depth();
}

void Engine::make_gradient_buffers() {
  std::vector<std::int64_t> unit_bytes;
  std::vector<std::int64_t> slice_bytes;
  bool all_at_rest = true;
  for (const auto& unit : units_) {
    unit_bytes.push_back(unit->gradient_bytes());
    slice_bytes.push_back(unit->slice_bytes({.rest_in_buffer = true}));
    for (const auto& group : unit->groups()) {
      all_at_rest = all_at_rest && group->whole_rest().defined();
    }
  }
  comm::Communicator* reader =
      parallel_.gradient_levels > 0 ? parallel_.cuts.front().reduce.get() : nullptr;
  gradient_buffers_ = std::make_unique<GradientBuffers>(
      all_at_rest ? std::vector<std::int64_t>() : unit_bytes,
      gradient_buffer_depth(),
      GradientBuffers::Until::kLeft,
      reader,
      &counters_,
      [this](UnitReduction& reduction) { leave_buffer(reduction); }
  );
  slices_ = std::make_unique<GradientBuffers>(
      slice_bytes,
      slice_depth(),
      GradientBuffers::Until::kFinished,
      nullptr,
      &counters_,
      [this](UnitReduction& reduction) { finish_reduction(reduction); }
  );
}

}  // namespace hypershard::shard
