// See group.h: packing, placing and the runtime and update planes. The gradient plane is in
// group_gradient.cpp.
#include "hypershard/shard/group.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "hypershard/core/error.h"

namespace hypershard::shard {

namespace {

// Cuts fall on cache lines for every dtype of four bytes and more.
constexpr std::int64_t kAlignment = 16;

layout::GroupPacking pack(const std::vector<LogicalParam>& params, const DataParallel& parallel) {
  std::vector<layout::PackRequest> requests;
  for (const LogicalParam& param : params) {
    requests.push_back({.name = param.name, .shape = param.shape});
  }
  std::vector<int> cut_sizes = parallel.cut_sizes();
  if (cut_sizes.empty()) {
    cut_sizes.push_back(1);
  }
  return layout::pack_group(requests, {.cut_sizes = cut_sizes, .alignment = kAlignment});
}

// Families side by side, so that each is one run of the buffer; otherwise the order of
// registration.
std::vector<LogicalParam> by_family(std::vector<LogicalParam> params) {
  std::stable_sort(params.begin(), params.end(), [](const LogicalParam& a, const LogicalParam& b) {
    return a.family < b.family;
  });
  return params;
}

comm::Communicator* find_plan_reduce(
    const std::vector<LogicalParam>& params, const DataParallel& parallel
) {
  const std::vector<std::string>& axes = params.front().part.reduce_axes;
  return axes.empty() ? nullptr : parallel.plan_reduce.at(axes).get();
}

std::vector<layout::Range> find_gaps(const layout::GroupPacking& packing) {
  std::vector<layout::Range> gaps;
  std::int64_t end = 0;
  for (const layout::Segment& segment : packing.segments) {
    if (segment.offset > end) {
      gaps.push_back({end, segment.offset});
    }
    end = segment.offset + segment.numel;
  }
  if (packing.numel > end) {
    gaps.push_back({end, packing.numel});
  }
  return gaps;
}

at::Tensor zeros(std::int64_t numel, c10::ScalarType dtype) {
  return at::zeros({numel}, at::TensorOptions().dtype(dtype));
}

std::string parameters_text(const std::vector<LogicalParam>& params) {
  constexpr std::size_t kShown = 4;
  std::string text;
  for (std::size_t i = 0; i < params.size() && i < kShown; ++i) {
    text += (i == 0 ? "" : ", ") + params[i].name;
  }
  return params.size() > kShown ? text + ", … " + std::to_string(params.size()) + " in all" : text;
}

}  // namespace

std::string to_text(RuntimeMode mode) {
  switch (mode) {
    case RuntimeMode::kResident:
      return "resident";
    case RuntimeMode::kGathered:
      return "gathered";
    case RuntimeMode::kPooled:
      return "gathered once a supernode";
    case RuntimeMode::kShared:
      return "shared";
  }
  return "?";
}

ParamGroup::ParamGroup(
    std::string name,
    std::string unit,
    std::vector<LogicalParam> params,
    GroupDtypes dtypes,
    bool trainable,
    const DataParallel* parallel,
    Counters* counters
)
    : name_(std::move(name)),
      unit_(std::move(unit)),
      params_(by_family(std::move(params))),
      dtypes_(dtypes),
      trainable_(trainable),
      parallel_(parallel),
      counters_(counters),
      plan_reduce_(find_plan_reduce(params_, *parallel)),
      packing_(pack(params_, *parallel)),
      buffer_numel_(packing_.numel),
      gaps_(find_gaps(packing_)),
      written_(params_.size(), 0),
      arrived_(params_.size(), 0) {
  plan_reduction();
}

RuntimeMode ParamGroup::choose_mode(
    const DataParallel& parallel, const GroupDtypes& dtypes, bool may_share, std::string* why_not
) {
  int pieces = 1;
  for (int level = 0; level < parallel.runtime_levels; ++level) {
    pieces *= parallel.cuts[static_cast<std::size_t>(level)].size;
  }
  if (pieces == 1) {
    *why_not = "the runtime layout is whole on every rank";
    return RuntimeMode::kResident;
  }
  const DataAxis& first = parallel.cuts.front();
  if (!may_share) {
    *why_not = "sharing is off";
  } else if (first.size == 1) {
    *why_not = "axis '" + first.name + "' has one rank";
  } else if (!first.gather->has_shared_memory()) {
    *why_not = "the ranks of axis '" + first.name + "' talk through " + first.gather->backend() +
               ", which has no shared memory";
  } else if (dtypes.storage != dtypes.compute) {
    *why_not = "parameters are stored and computed in different dtypes";
  } else {
    return pieces == first.size ? RuntimeMode::kShared : RuntimeMode::kPooled;
  }
  return RuntimeMode::kGathered;
}

void ParamGroup::place(
    RuntimeMode mode, const std::byte* read, std::byte* write, std::shared_ptr<void> owner
) {
  mode_ = mode;
  const layout::Range own = runtime_range();
  const auto item = static_cast<std::int64_t>(c10::elementSize(dtypes_.storage));
  if (mode == RuntimeMode::kShared) {
    shard_ = flat_tensor(write + own.begin * item, own.numel(), dtypes_.storage, owner);
    // Kernels take non-const pointers even to read; the pages behind them are read-only.
    resident_data_ = const_cast<std::byte*>(read);
  } else {
    if (mode == RuntimeMode::kResident) {
      dtypes_.storage = dtypes_.compute;  // nothing is gathered, so there is nothing to store apart
    }
    shard_ = zeros(own.numel(), dtypes_.storage);
    resident_data_ = mode == RuntimeMode::kResident ? shard_.mutable_data_ptr() : nullptr;
  }
  const layout::Range mine = update_range();
  update_is_runtime_ = dtypes_.storage == dtypes_.update;
  if (update_is_runtime_) {
    const at::Tensor slice = shard_.narrow(0, mine.begin - own.begin, mine.numel());
    update_ = flat_tensor(
        slice.mutable_data_ptr(), mine.numel(), dtypes_.update, std::make_shared<at::Tensor>(shard_)
    );
  } else {
    update_ = zeros(mine.numel(), dtypes_.update);
  }
  make_update_tensors();
  adopt_parameters();
}

void ParamGroup::adopt_parameters() {
  const c10::NoGradGuard no_grad;
  const layout::Range mine = update_range();
  const layout::Range own = runtime_range();
  whole_.emplace(
      whole_compute_bytes(),
      c10::Device(c10::kCPU),
      "hypershard: a parameter of unit '" + unit_ + "' (" + parameters_text(params_) +
          ") was accessed while the unit is resharded. To read it call unshard(\"" + unit_ +
          "\") first, or full_parameter(name). If an optimizer or a clipping function did this: "
          "build it over update_parameters() of the sharded model"
  );
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const layout::Segment& segment = packing_.segments[i];
    at::Tensor& tensor = params_[i].tensor;
    if (!params_[i].on_meta) {
      const at::Tensor flat = tensor.detach().reshape({-1});
      const layout::Range whole{segment.offset, segment.offset + segment.numel};
      if (const layout::Range part = layout::intersect(whole, mine); part.numel() > 0) {
        update_.narrow(0, part.begin - mine.begin, part.numel())
            .copy_(flat.narrow(0, part.begin - whole.begin, part.numel()));
      }
      if (const layout::Range part = layout::intersect(whole, own);
          part.numel() > 0 && !update_is_runtime_) {
        // Through the update dtype, so that publishing later gives the same bits.
        shard_.narrow(0, part.begin - own.begin, part.numel())
            .copy_(flat.narrow(0, part.begin - whole.begin, part.numel()).to(dtypes_.update));
      } else if (part.numel() > 0) {
        shard_.narrow(0, part.begin - own.begin, part.numel())
            .copy_(flat.narrow(0, part.begin - whole.begin, part.numel()));
      }
    }
    const at::Tensor view = whole_->view(segment.offset, segment.shape, dtypes_.compute);
    if (params_[i].on_meta) {
      tensor.unsafeGetTensorImpl()->shallow_copy_from(view.getIntrusivePtr()
      );  // set_data refuses to change the device
    } else {
      tensor.set_data(view);
    }
  }
  if (mode_ == RuntimeMode::kResident) {
    whole_->attach(resident_data_);
  }
}

void ParamGroup::add_unshard_stages(
    std::vector<StagedWork::Stage>& stages,
    const at::Tensor& storage_bytes,
    const at::Tensor& compute_bytes
) {
  if (!gathers()) {
    return;
  }
  const at::Tensor whole = typed_view(storage_bytes, 0, packing_.numel, dtypes_.storage);
  at::Tensor input = shard_;
  // The ranks along the first cut write side by side into a buffer that they share.
  const int last = mode_ == RuntimeMode::kPooled ? 1 : 0;
  for (int level = parallel_->runtime_levels - 1; level >= last; --level) {
    const DataAxis& axis = parallel_->cuts[static_cast<std::size_t>(level)];
    if (axis.size == 1) {
      continue;
    }
    const std::vector<int> coords = parallel_->coordinates(level);
    const layout::Range range = packing_.range(coords);
    const at::Tensor output = whole.narrow(0, range.begin, range.numel());
    stages.push_back([this, &axis, output, input, counts = packing_.counts(coords)] {
      counters_->gathered_bytes += (output.numel() - input.numel()) * output.element_size();
      return axis.gather->all_gather(output, input, counts, unit_);
    });
    input = output;
  }
  if (dtypes_.storage != dtypes_.compute) {
    stages.push_back(
        [this, whole, compute = typed_view(compute_bytes, 0, packing_.numel, dtypes_.compute)] {
          const c10::NoGradGuard no_grad;
          compute.copy_(whole);
          counters_->copied_bytes += compute.numel() * compute.element_size();
          return comm::WorkPtr();
        }
    );
  }
}

void ParamGroup::attach(const at::Tensor& compute_bytes) {
  if (mode_ != RuntimeMode::kResident) {
    whole_->attach(
        mode_ == RuntimeMode::kShared ? resident_data_ : compute_bytes.mutable_data_ptr()
    );
  }
}

void ParamGroup::detach() {
  if (mode_ != RuntimeMode::kResident) {
    whole_->detach();
  }
}

// Gathers in place, innermost level first; `whole` covers `whole_range` of the packing.
void ParamGroup::add_gather_stages(
    std::vector<StagedWork::Stage>& stages,
    const at::Tensor& whole,
    layout::Range whole_range,
    int from_level,
    int to_level
) {
  for (int level = from_level - 1; level >= to_level; --level) {
    const DataAxis& axis = parallel_->cuts[static_cast<std::size_t>(level)];
    if (axis.size == 1) {
      continue;
    }
    const std::vector<int> coords = parallel_->coordinates(level);
    const layout::Range range = packing_.range(coords);
    const layout::Range own = packing_.range(parallel_->coordinates(level + 1));
    stages.push_back([this,
                      &axis,
                      output = whole.narrow(0, range.begin - whole_range.begin, range.numel()),
                      input = whole.narrow(0, own.begin - whole_range.begin, own.numel()),
                      counts = packing_.counts(coords)] {
      return axis.gather->all_gather(output, input, counts, unit_);
    });
  }
}

std::uint64_t ParamGroup::update_version() const {
  std::uint64_t sum = 0;
  for (const UpdateTensor& update : updates_) {
    sum += static_cast<std::uint64_t>(update.tensor._version());
  }
  return sum;
}

// Versions are a rank's own, and one that owns no element sees no write: they may forbid to leave a
// publish out, not decide it.
void ParamGroup::check_frozen() const {
  HS_CHECK(
      trainable_ || !frozen_version_ || update_version() == *frozen_version_,
      "shard: update tensors of frozen parameters were written: group '",
      name_,
      "' of unit '",
      unit_,
      "'",
      HS_HINT("call sync_runtime() on every rank after writing them: what is frozen is not "
              "published in every step")
  );
}

bool ParamGroup::write_runtime(bool even_frozen) {
  is_publishing_ = trainable_ || even_frozen || !frozen_version_;
  if (is_publishing_) {
    copy_to_runtime();
    bump_versions();
    frozen_version_ = trainable_ ? std::nullopt : std::optional(update_version());
  }
  return is_publishing_;
}

void ParamGroup::copy_to_runtime() {
  const c10::NoGradGuard no_grad;
  if (!update_is_runtime_) {
    const layout::Range own = runtime_range();
    const layout::Range mine = update_range();
    at::Tensor slice = shard_.narrow(0, mine.begin - own.begin, mine.numel());
    slice.copy_(update_);
    counters_->published_bytes += slice.numel() * slice.element_size();
  }
}

void ParamGroup::add_publish_stages(std::vector<StagedWork::Stage>& stages) {
  if (!is_publishing_) {
    return;
  }
  add_gather_stages(
      stages, shard_, runtime_range(), parallel_->update_levels, parallel_->runtime_levels
  );
}

void ParamGroup::bump_versions() {
  for (const LogicalParam& param : params_) {
    param.tensor.unsafeGetTensorImpl()->bump_version();
  }
}

// Padding goes with the family before it, so that the runs cover the whole range.
void ParamGroup::make_update_tensors() {
  const layout::Range mine = update_range();
  const auto add = [&](std::size_t first, std::size_t last) {
    const std::int64_t begin = first == 0 ? 0 : packing_.segments[first].offset;
    const std::int64_t end =
        last == params_.size() ? packing_.numel : packing_.segments[last].offset;
    const layout::Range run = layout::intersect({begin, end}, mine);
    if (run.numel() == 0 && !(last == params_.size() && updates_.empty())) {
      return;
    }
    const std::string& family = params_[first].family;
    UpdateTensor update{
        .name = name_ + "/" + family, .family = family, .tensor = {}, .range = run, .pieces = {}
    };
    const at::Tensor slice =
        update_.narrow(0, run.numel() == 0 ? 0 : run.begin - mine.begin, run.numel());
    update.tensor = flat_tensor(
        slice.mutable_data_ptr(), run.numel(), dtypes_.update, std::make_shared<at::Tensor>(update_)
    );
    for (std::size_t i = first; i < last; ++i) {
      const layout::Segment& segment = packing_.segments[i];
      const layout::Range part =
          layout::intersect({segment.offset, segment.offset + segment.numel}, run);
      if (part.numel() > 0) {
        update.pieces.push_back(
            {.name = segment.name,
             .shape = params_[i].part.block.shape,
             .block = params_[i].part.block,
             .is_first = params_[i].part.is_first,
             .range = {part.begin - segment.offset, part.end - segment.offset},
             .offset = part.begin - run.begin}
        );
      }
    }
    updates_.push_back(std::move(update));
  };
  std::size_t first = 0;
  for (std::size_t i = 1; i <= params_.size(); ++i) {
    if (i == params_.size() || params_[i].family != params_[first].family) {
      add(first, i);
      first = i;
    }
  }
}

bool ParamGroup::gradient_is_fresh() const {
  return std::none_of(updates_.begin(), updates_.end(), [](const UpdateTensor& update) {
    return update.tensor.grad().defined();
  });
}

at::Tensor ParamGroup::gather_update(const at::Tensor& own) {
  const c10::NoGradGuard no_grad;
  const layout::Range mine = update_range();
  HS_CHECK_EQ(
      own.numel(),
      mine.numel(),
      "shard: gather_update of group '",
      name_,
      "' wants the rank's own update range"
  );
  at::Tensor whole = at::empty({packing_.numel}, own.options());
  whole.narrow(0, mine.begin, mine.numel()).copy_(own);
  std::vector<StagedWork::Stage> stages;
  add_gather_stages(stages, whole, {0, packing_.numel}, parallel_->update_levels, 0);
  StagedWork(std::move(stages)).wait_released();
  return whole;
}

}  // namespace hypershard::shard
