// See fully_shard.h: finds units and parameters in a module tree and connects the module's hooks
// with the engine.
#include "hypershard/shard/fully_shard.h"

#include <algorithm>
#include <map>
#include <utility>

#include <ATen/ops/empty_like.h>
#include <torch/nn/module.h>

#include "hypershard/core/env.h"
#include "hypershard/core/error.h"
#include "hypershard/core/glob.h"
#include "hypershard/core/hash.h"
#include "hypershard/core/suggest.h"
#include "hypershard/nn/gradient_slot.h"
#include "hypershard/nn/hooks.h"
#include "hypershard/shard/engine.h"
#include "hypershard/shard/internal/agreement.h"

namespace hypershard::shard {

namespace {

class UnitHooks final : public nn::ForwardHooks {
 public:
  UnitHooks(std::shared_ptr<Engine> engine, int unit) : engine_(std::move(engine)), unit_(unit) {}
  void pre_forward(std::span<at::Tensor* const> inputs) override {
    engine_->pre_forward(unit_, inputs);
  }
  void post_forward(std::span<at::Tensor* const> outputs) override {
    engine_->post_forward(unit_, outputs);
  }
  void forward_failed() noexcept override { engine_->forward_failed(); }

 private:
  std::shared_ptr<Engine>
      engine_;  // the module keeps its engine alive; the engine knows tensors only
  int unit_;
};

struct NamedModule {
  std::string path;
  torch::nn::Module* module;
};

void list_modules(
    torch::nn::Module& module, const std::string& path, std::vector<NamedModule>& out
) {
  out.push_back({path, &module});
  for (const auto& child : module.named_children()) {
    list_modules(*child.value(), path.empty() ? child.key() : path + "." + child.key(), out);
  }
}

std::vector<Glob> compile(const std::vector<std::string>& patterns) {
  std::vector<Glob> globs;
  for (const std::string& pattern : patterns) {
    globs.emplace_back(pattern);
  }
  return globs;
}

bool any_matches(const std::vector<Glob>& globs, const std::string& path) {
  return std::any_of(globs.begin(), globs.end(), [&](const Glob& glob) {
    return glob.matches(path);
  });
}

bool encloses(const std::string& outer, const std::string& inner) {
  return outer.empty() || inner == outer ||
         (inner.size() > outer.size() && inner.compare(0, outer.size(), outer) == 0 &&
          inner[outer.size()] == '.');
}

// Collects units and their parameters from a module tree.
class Collector {
 public:
  Collector(torch::nn::Module& root, const FullyShardOptions& options)
      : options_(options),
        unit_globs_(compile(options.units)),
        ignored_globs_(compile(options.ignored)) {
    list_modules(root, "", modules_);
    find_units();
    find_parameters();
    check_ignored();
  }

  std::vector<NamedModule> units() const { return units_; }
  std::vector<UnitSpec> specs();

 private:
  struct Found {
    LogicalParam param;
    std::size_t unit = 0;
  };

  void find_units() {
    std::vector<std::string> paths;
    for (const NamedModule& each : modules_) {
      paths.push_back(each.path);
      if (each.path.empty() || any_matches(unit_globs_, each.path)) {
        units_.push_back(each);
      }
    }
    for (const Glob& glob : unit_globs_) {
      const bool hit = std::any_of(paths.begin(), paths.end(), [&](const std::string& path) {
        return glob.matches(path);
      });
      HS_CHECK(
          hit,
          "shard: units pattern '",
          glob.pattern(),
          "' matches no module; the model has ",
          paths.size(),
          " modules",
          HS_HINT(suggestion(glob.pattern(), paths))
      );
    }
    for (const NamedModule& unit : units_) {
      HS_CHECK(
          dynamic_cast<nn::HookPoint*>(unit.module) != nullptr,
          "shard: module '",
          unit.path.empty() ? std::string("(root)") : unit.path,
          "' of type ",
          unit.module->name(),
          " has no forward hooks and cannot be a unit",
          HS_HINT(
              "derive its Impl from nn::Hookable, or build it as nn::Hooked<",
              unit.module->name(),
              ">"
          )
      );
    }
  }

  std::size_t unit_of(const std::string& module_path) const {
    std::size_t best = 0;
    for (std::size_t i = 1; i < units_.size(); ++i) {
      if (encloses(units_[i].path, module_path) &&
          units_[i].path.size() > units_[best].path.size()) {
        best = i;
      }
    }
    return best;
  }

  // The innermost unit that encloses two units: where a tied parameter must live to be whole in
  // both.
  std::size_t common_unit(std::size_t a, std::size_t b) const {
    std::size_t best = 0;
    for (std::size_t i = 1; i < units_.size(); ++i) {
      if (encloses(units_[i].path, units_[a].path) && encloses(units_[i].path, units_[b].path) &&
          units_[i].path.size() > units_[best].path.size()) {
        best = i;
      }
    }
    return best;
  }

  void find_parameters() {
    for (const NamedModule& each : modules_) {
      const std::size_t unit = unit_of(each.path);
      for (const auto& item : each.module->named_parameters(/*recurse=*/false)) {
        if (item.value().defined()) {
          add(each.path.empty() ? item.key() : each.path + "." + item.key(), item.value(), unit);
        }
      }
    }
  }

  void add(const std::string& name, const at::Tensor& tensor, std::size_t unit) {
    names_.push_back(name);
    if (any_matches(ignored_globs_, name)) {
      return;
    }
    HS_CHECK(
        nn::slot_of(tensor) == nullptr,
        "shard: parameter '",
        name,
        "' belongs to a sharded model already",
        HS_HINT("call fully_shard once, on the outermost module")
    );
    HS_SUPPORTED(
        tensor.is_meta() || tensor.device().is_cpu(),
        "shard: parameter '",
        name,
        "' lies on device ",
        tensor.device().str(),
        "; only cpu and meta are supported in this build"
    );
    const auto known = by_tensor_.find(tensor.unsafeGetTensorImpl());
    if (known != by_tensor_.end()) {
      Found& first = found_[known->second];
      first.param.aliases.push_back(name);
      first.unit = common_unit(first.unit, unit);
      return;
    }
    by_tensor_[tensor.unsafeGetTensorImpl()] = found_.size();
    LogicalParam param{
        .name = name,
        .aliases = {},
        .tensor = tensor,
        .shape = tensor.sizes().vec(),
        .family = {},
        .on_meta = tensor.is_meta()
    };
    if (options_.update_family) {
      param.family = options_.update_family(name, param.shape);
    } else {
      param.family = param.shape.size() >= 2 ? "decay" : "no_decay";
    }
    found_.push_back({std::move(param), unit});
  }

  void check_ignored() const {
    for (const Glob& glob : ignored_globs_) {
      const bool hit = std::any_of(names_.begin(), names_.end(), [&](const std::string& name) {
        return glob.matches(name);
      });
      HS_CHECK(
          hit,
          "shard: ignored pattern '",
          glob.pattern(),
          "' matches no parameter; the model has ",
          names_.size(),
          HS_HINT(suggestion(glob.pattern(), names_))
      );
    }
  }

  const FullyShardOptions& options_;
  std::vector<Glob> unit_globs_;
  std::vector<Glob> ignored_globs_;
  std::vector<NamedModule> modules_;
  std::vector<NamedModule> units_;
  std::vector<std::string> names_;
  std::vector<Found> found_;
  std::map<const c10::TensorImpl*, std::size_t> by_tensor_;
};

bool is_half(c10::ScalarType dtype) {
  return c10::isFloatingType(dtype) && c10::elementSize(dtype) < 4;
}

GroupDtypes settle_dtypes(const MixedPrecision& precision, const LogicalParam& param) {
  const c10::ScalarType own = param.tensor.scalar_type();
  if (!c10::isFloatingType(own)) {
    HS_CHECK(
        !param.tensor.requires_grad(),
        "shard: parameter '",
        param.name,
        "' of dtype ",
        c10::toString(own),
        " requires a gradient; only floating parameters can"
    );
    return {.storage = own, .compute = own, .reduce = own, .update = own};
  }
  const auto widen = [](c10::ScalarType dtype) { return is_half(dtype) ? c10::kFloat : dtype; };
  GroupDtypes dtypes;
  dtypes.compute = precision.compute.value_or(own);
  dtypes.storage = precision.storage.value_or(dtypes.compute);
  dtypes.reduce = precision.reduce.value_or(widen(dtypes.compute));
  dtypes.update = precision.update.value_or(widen(own));
  return dtypes;
}

std::vector<UnitSpec> Collector::specs() {
  std::vector<UnitSpec> specs;
  for (const NamedModule& unit : units_) {
    specs.push_back({.path = unit.path, .params = {}});
  }
  for (Found& found : found_) {
    const GroupDtypes dtypes = settle_dtypes(options_.precision, found.param);
    specs[found.unit].params.push_back({.param = std::move(found.param), .dtypes = dtypes});
  }
  return specs;
}

void check_precision(const MixedPrecision& precision) {
  const auto check = [](const std::optional<c10::ScalarType>& dtype, const char* what) {
    HS_CHECK(
        !dtype || *dtype == c10::kDouble || *dtype == c10::kFloat || *dtype == c10::kBFloat16 ||
            *dtype == c10::kHalf,
        "shard: precision.",
        what,
        " is ",
        c10::toString(dtype.value_or(c10::kFloat)),
        "; expected float64, float32, bfloat16 or float16"
    );
  };
  check(precision.storage, "storage");
  check(precision.compute, "compute");
  check(precision.reduce, "reduce");
  check(precision.update, "update");
  check(precision.output, "output");
}

// A hash of the values' bits, eight bytes at a time; enough to catch a rank that was seeded
// otherwise.
std::int64_t hash_values(const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach().contiguous();
  const auto bytes = static_cast<std::size_t>(values.numel() * values.element_size());
  const auto* data = static_cast<const char*>(values.const_data_ptr());
  std::uint64_t hash = kHashSeed + bytes;
  std::size_t at = 0;
  for (; at + 8 <= bytes; at += 8) {
    std::uint64_t word = 0;
    std::copy_n(data + at, 8, reinterpret_cast<char*>(&word));
    hash = (hash ^ word) * 0x9e3779b97f4a7c15ULL;
    hash ^= hash >> 32;
  }
  return static_cast<std::int64_t>(hash_memory(data + at, bytes - at, hash));
}

at::Tensor one_number(std::int64_t value) {
  at::Tensor tensor = at::empty({1}, at::TensorOptions().dtype(at::kLong));
  tensor.fill_(value);
  return tensor;
}

// Ranks with other options would start other collectives, and hang or mix up gradients.
void agree_on_options(
    const comm::ProcessMesh& mesh,
    const FullyShardOptions& options,
    const layout::PlaneLayouts& layouts
) {
  const std::string text = concat_text(
      "runtime ",
      to_text(layouts.runtime, mesh.mesh()),
      ", gradient ",
      to_text(layouts.gradient, mesh.mesh()),
      ", update ",
      to_text(layouts.update, mesh.mesh()),
      "; reshard_after_forward ",
      options.reshard_after_forward,
      ", forward_prefetch ",
      options.forward_prefetch,
      ", backward_prefetch ",
      options.backward_prefetch,
      ", gradient_buffers ",
      options.gradient_buffers,
      ", share ",
      static_cast<int>(options.share),
      ", initial_values ",
      static_cast<int>(options.initial_values)
  );
  const auto everyone = mesh.world().world_communicator();
  const at::Tensor all =
      internal::gather_rows(*everyone, one_number(static_cast<std::int64_t>(hash_bytes(text))));
  const auto* rows = all.const_data_ptr<std::int64_t>();
  for (int rank = 1; rank < everyone->size(); ++rank) {
    HS_CHECK(
        rows[rank] == rows[0],
        "shard: rank ",
        rank,
        " was given other options of fully_shard than rank 0; this rank, ",
        mesh.rank(),
        ", has ",
        text,
        HS_HINT("give all ranks the same options")
    );
  }
}

// Throws, naming the first parameter that is not the same everywhere. `signature` has two numbers a
// parameter: what it is, and its values.
void report_difference(
    const std::vector<const LogicalParam*>& params,
    const std::vector<std::int64_t>& signature,
    comm::Communicator& ranks
) {
  const at::Tensor counts =
      internal::gather_rows(ranks, one_number(static_cast<std::int64_t>(params.size())));
  at::Tensor mine = at::empty(
      {static_cast<std::int64_t>(signature.size())}, at::TensorOptions().dtype(at::kLong)
  );
  std::copy(signature.begin(), signature.end(), mine.mutable_data_ptr<std::int64_t>());
  const auto* per_rank = counts.const_data_ptr<std::int64_t>();
  for (int r = 0; r < ranks.size(); ++r) {
    HS_CHECK_EQ(
        per_rank[r],
        per_rank[0],
        "shard: ranks were given different models: rank ",
        ranks.info().global_ranks[static_cast<std::size_t>(r)],
        " has another number of parameters than rank ",
        ranks.info().global_ranks[0]
    );
  }
  const at::Tensor all = internal::gather_rows(ranks, mine);
  const auto* rows = all.const_data_ptr<std::int64_t>();
  const auto width = static_cast<std::int64_t>(signature.size());
  for (std::int64_t i = 0; i < width; ++i) {
    for (int r = 1; r < ranks.size(); ++r) {
      const LogicalParam& param = *params[static_cast<std::size_t>(i / 2)];
      const int global = ranks.info().global_ranks[static_cast<std::size_t>(r)];
      const char* what = i % 2 == 0
                             ? "name, shape, dtype, unit, update family, precision or requires_grad"
                             : "initial values";
      HS_CHECK(
          rows[r * width + i] == rows[i],
          "shard: parameter '",
          param.name,
          "' (shape ",
          param.shape,
          ") differs in ",
          what,
          " between rank ",
          ranks.info().global_ranks[0],
          " and rank ",
          global,
          HS_HINT("seed every rank alike before building the model, or set initial_values = "
                  "broadcast to take rank 0's, or trust to take each rank's own part")
      );
    }
  }
}

void agree_on_values(
    const std::vector<UnitSpec>& specs, comm::Communicator& ranks, InitialValues how
) {
  if (ranks.size() == 1) {
    return;
  }
  std::vector<const LogicalParam*> params;
  std::vector<std::int64_t> signature;
  for (const UnitSpec& spec : specs) {
    for (const UnitParam& each : spec.params) {
      params.push_back(&each.param);
      const std::string shape = hypershard::concat_text(
          each.param.name,
          each.param.shape,
          c10::toString(each.param.tensor.scalar_type()),
          " in ",
          spec.path,
          each.param.family,
          each.param.tensor.requires_grad(),
          static_cast<int>(each.dtypes.storage),
          static_cast<int>(each.dtypes.compute),
          static_cast<int>(each.dtypes.reduce),
          static_cast<int>(each.dtypes.update)
      );
      const bool compare_values = how == InitialValues::kCheckEqual && !each.param.on_meta;
      signature.push_back(static_cast<std::int64_t>(hash_bytes(shape)));
      signature.push_back(compare_values ? hash_values(each.param.tensor) : 0);
    }
  }
  // One number tells whether all agree; only if not is it worth finding out who does not.
  const auto hash = static_cast<std::int64_t>(
      hash_memory(signature.data(), signature.size() * sizeof(signature.front()))
  );
  if (!internal::equal_on_all_ranks(ranks, one_number(hash))) {
    report_difference(params, signature, ranks);
  }
  if (how == InitialValues::kBroadcast) {
    const c10::NoGradGuard no_grad;
    for (const LogicalParam* param : params) {
      if (!param->on_meta) {
        at::Tensor values = param->tensor.detach().contiguous();
        ranks.broadcast(values, 0, param->name)->wait_released();
        at::Tensor target = param->tensor;
        target.copy_(values);
      }
    }
  }
}

}  // namespace

ShardedModel fully_shard(
    torch::nn::Module& module, const comm::ProcessMesh& mesh, const FullyShardOptions& given
) {
  const ErrorContext context("fully_shard");
  FullyShardOptions options = given;
  check_precision(options.precision);
  if (env::get_string("HS_DEBUG_RESHARD") == "nan") {
    options.reshard_debug = ReshardDebug::kNan;
  }
  const std::string share = env::get_string("HS_SHARE");
  if (share != "auto" && options.share == Share::kAuto) {
    options.share = share == "on" ? Share::kOn : Share::kOff;
  }
  Collector collector(module, options);
  std::vector<UnitSpec> specs = collector.specs();
  const layout::DataAxes axes = layout::find_data_axes(mesh.mesh(), options.strategy);
  const layout::PlaneLayouts layouts =
      options.layouts ? *options.layouts
                      : layout::plane_layouts(options.strategy, mesh.mesh(), axes);
  agree_on_options(mesh, options, layouts);
  DataParallel parallel = make_data_parallel(mesh, layouts, axes);
  agree_on_values(specs, *parallel.control, options.initial_values);
  auto engine = std::make_shared<Engine>(
      std::move(parallel), axes.replicate, std::move(options), std::move(specs)
  );
  engine->hook_all_parameters();
  const std::vector<NamedModule> units = collector.units();
  for (std::size_t i = 0; i < units.size(); ++i) {
    dynamic_cast<nn::HookPoint&>(*units[i].module)
        .add_forward_hooks(std::make_shared<UnitHooks>(engine, static_cast<int>(i)));
  }
  return ShardedModel(std::move(engine));
}

}  // namespace hypershard::shard
