// See fully_shard.h: finds units and parameters in a module tree and connects the module's hooks
// with the engine.
#include "hypershard/shard/fully_shard.h"

#include <algorithm>
#include <map>
#include <utility>

#include <torch/nn/module.h>

#include "hypershard/core/env.h"
#include "hypershard/core/error.h"
#include "hypershard/core/glob.h"
#include "hypershard/core/suggest.h"
#include "hypershard/layout/sharding.h"
#include "hypershard/nn/gradient_slot.h"
#include "hypershard/nn/hooks.h"
#include "hypershard/shard/engine.h"
#include "hypershard/shard/internal/agreement.h"
#include "hypershard/shard/internal/dtypes.h"

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
    check_parameters();
  }

  std::vector<NamedModule> units() const { return units_; }
  std::vector<UnitSpec> specs(const comm::ProcessMesh& mesh, const layout::DataAxes& axes);

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
        .part = {},
        .family = {},
        .on_meta = tensor.is_meta()
    };
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

  void check_parameters() const {
    for (const auto& [name, given] : options_.parameters) {
      HS_CHECK(
          std::find(names_.begin(), names_.end(), name) != names_.end(),
          "shard: options.parameters names '",
          name,
          "', which the model does not have; it has ",
          names_.size(),
          " parameters",
          HS_HINT(suggestion(name, names_))
      );
    }
  }

  // A tied parameter may be spoken of by any of its names, but with one voice.
  const ParameterSpec* given_for(const LogicalParam& param) const {
    const auto first = options_.parameters.find(param.name);
    const ParameterSpec* given = first == options_.parameters.end() ? nullptr : &first->second;
    for (const std::string& alias : param.aliases) {
      const auto other = options_.parameters.find(alias);
      if (other == options_.parameters.end()) {
        continue;
      }
      HS_CHECK(
          given == nullptr || (given->spec == other->second.spec &&
                               given->reduce_axes == other->second.reduce_axes),
          "shard: options.parameters says different things of '",
          param.name,
          "' and '",
          alias,
          "', which are one tensor",
          HS_HINT("give a tied parameter one layout and one list of reduce_axes")
      );
      given = &other->second;
    }
    return given;
  }

  std::string family_of(const LogicalParam& param) const {
    const std::vector<std::int64_t>& shape = param.part.block.shape;
    if (options_.update_family) {
      return options_.update_family(param.name, shape);
    }
    return shape.size() >= 2 ? "decay" : "no_decay";
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

std::vector<UnitSpec> Collector::specs(
    const comm::ProcessMesh& mesh, const layout::DataAxes& axes
) {
  std::vector<UnitSpec> specs;
  for (const NamedModule& unit : units_) {
    specs.push_back({.path = unit.path, .params = {}});
  }
  for (Found& found : found_) {
    LogicalParam& param = found.param;
    param.part =
        find_part(param.name, param.shape, given_for(param), mesh.mesh(), axes, mesh.rank());
    param.family = family_of(param);
    const GroupDtypes dtypes = internal::settle_dtypes(options_.precision, param);
    specs[found.unit].params.push_back({.param = std::move(found.param), .dtypes = dtypes});
  }
  return specs;
}

// A mesh of plan axes alone is one data-parallel rank a part: nothing is cut over data.
layout::DataAxes find_data_axes(const layout::DeviceMesh& mesh, const FullyShardOptions& options) {
  const bool has_any = mesh.has_axis("replicate") || mesh.has_axis("shard") || mesh.has_axis("dp");
  return has_any || options.parameters.empty() ? layout::find_data_axes(mesh, options.strategy)
                                               : layout::DataAxes{};
}

layout::PlaneLayouts find_layouts(
    const layout::DeviceMesh& mesh, const FullyShardOptions& options, const layout::DataAxes& axes
) {
  if (options.layouts) {
    return *options.layouts;
  }
  if (axes.replicate.empty() && axes.shard.empty()) {
    const layout::Layout whole = layout::replicated_layout(mesh);
    return {.runtime = whole, .gradient = whole, .update = whole};
  }
  return layout::plane_layouts(options.strategy, mesh, axes);
}

// After all have agreed on the parameters, so that all make the same communicators.
void add_plan_reductions(
    DataParallel& parallel, const std::vector<UnitSpec>& specs, const comm::ProcessMesh& mesh
) {
  for (const UnitSpec& spec : specs) {
    for (const UnitParam& each : spec.params) {
      const std::vector<std::string>& axes = each.param.part.reduce_axes;
      if (axes.empty() || parallel.plan_reduce.count(axes) > 0) {
        continue;
      }
      std::string name;
      for (const std::string& axis : axes) {
        name += (name.empty() ? "" : "+") + axis;
      }
      parallel.plan_reduce[axes] =
          mesh.world().communicator(name + ":reduce", mesh.mesh().group(axes, mesh.rank()));
    }
  }
}

}  // namespace

ShardedModel fully_shard(
    torch::nn::Module& module, const comm::ProcessMesh& mesh, const FullyShardOptions& given
) {
  const ErrorContext context("fully_shard");
  FullyShardOptions options = given;
  internal::check_precision(options.precision);
  if (env::get_string("HS_DEBUG_RESHARD") == "nan") {
    options.reshard_debug = ReshardDebug::kNan;
  }
  const std::string share = env::get_string("HS_SHARE");
  if (share != "auto" && options.share == Share::kAuto) {
    options.share = share == "on" ? Share::kOn : Share::kOff;
  }
  Collector collector(module, options);
  const layout::DataAxes axes = find_data_axes(mesh.mesh(), options);
  std::vector<UnitSpec> specs = collector.specs(mesh, axes);
  const layout::PlaneLayouts layouts = find_layouts(mesh.mesh(), options, axes);
  internal::agree_on_options(mesh, options, layouts);
  DataParallel parallel = make_data_parallel(mesh, layouts, axes);
  internal::agree_on_parameters(specs, parallel, mesh, options.initial_values);
  add_plan_reductions(parallel, specs, mesh);
  auto engine = std::make_shared<Engine>(std::move(parallel), std::move(options), std::move(specs));
  engine->hook_all_parameters();
  const std::vector<NamedModule> units = collector.units();
  for (std::size_t i = 0; i < units.size(); ++i) {
    dynamic_cast<nn::HookPoint&>(*units[i].module)
        .add_forward_hooks(std::make_shared<UnitHooks>(engine, static_cast<int>(i)));
  }
  return ShardedModel(std::move(engine));
}

}  // namespace hypershard::shard
