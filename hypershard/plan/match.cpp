// See match.h.
#include "hypershard/plan/match.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include <torch/nn/module.h>

#include "hypershard/core/error.h"
#include "hypershard/core/glob.h"
#include "hypershard/core/suggest.h"

namespace hypershard::plan {

using layout::Placement;

namespace {

void list_modules(
    torch::nn::Module& module,
    const std::string& path,
    std::set<const torch::nn::Module*>& seen,
    std::vector<NamedModule>& out
) {
  if (!seen.insert(&module).second) {
    return;
  }
  out.push_back({path, &module, dynamic_cast<nn::HookPoint*>(&module)});
  for (const auto& child : module.named_children()) {
    list_modules(*child.value(), path.empty() ? child.key() : path + "." + child.key(), seen, out);
  }
}

// A placement and the rule that stated it.
struct Stated {
  Placement placement;
  const PlanRule* rule = nullptr;
  std::string name;  // under which the rule matched
};
using StatedByAxis = std::vector<std::optional<Stated>>;

void state(
    StatedByAxis& stated,
    const PlanRule& rule,
    const std::string& name,
    const std::string& subject,
    const layout::DeviceMesh& mesh
) {
  stated.resize(static_cast<std::size_t>(mesh.num_axes()));
  for (const auto& [axis, placement] : rule.placements) {
    auto& slot = stated[static_cast<std::size_t>(mesh.axis_index(axis))];
    if (!slot.has_value()) {
      slot = Stated{placement, &rule, name};
      continue;
    }
    HS_CHECK(
        slot->placement == placement,
        "plan: ",
        subject,
        " is ",
        placement_word(slot->placement),
        " on axis '",
        axis,
        "' by rule [",
        *slot->rule,
        "] (as '",
        slot->name,
        "') and ",
        placement_word(placement),
        " by rule [",
        rule,
        "] (as '",
        name,
        "')",
        HS_HINT(
            slot->name == name
                ? "narrow one of the two patterns, or make them agree"
                : "the two names are one tied weight, which has one layout: make the rules agree"
        )
    );
  }
}

class Matcher {
 public:
  Matcher(const ShardingPlan& plan, torch::nn::Module& model, const layout::DeviceMesh& mesh)
      : plan_(plan), mesh_(mesh), modules_(named_modules(model)) {
    find_tensors();
  }

  MatchedPlan run() {
    for (const PlanRule& rule : plan_.rules()) {
      check_axes(rule);
      const bool hit =
          rule.kind == RuleKind::kParameter ? match_parameters(rule) : match_modules(rule);
      if (!hit) {
        fail_unmatched(rule);
      }
    }
    settle_parameters();
    settle_sites();
    return std::move(result_);
  }

 private:
  void find_tensors() {
    for (const NamedModule& each : modules_) {
      const std::string prefix = each.path.empty() ? "" : each.path + ".";
      for (const auto& item : each.module->named_parameters(/*recurse=*/false)) {
        add_tensor(prefix + item.key(), item.value(), false);
      }
      for (const auto& item : each.module->named_buffers(/*recurse=*/false)) {
        add_tensor(prefix + item.key(), item.value(), true);
      }
    }
  }

  void add_tensor(const std::string& name, const at::Tensor& tensor, bool is_buffer) {
    if (!tensor.defined()) {
      return;
    }
    names_.push_back(name);
    const auto [known, is_new] =
        by_tensor_.try_emplace(tensor.unsafeGetTensorImpl(), result_.parameters.size());
    if (is_new) {
      result_.parameters.push_back({name, {}, tensor, {tensor.sizes().vec(), {}}, is_buffer});
    } else {
      result_.parameters[known->second].aliases.push_back(name);
    }
  }

  void check_axes(const PlanRule& rule) const {
    std::vector<std::string> names;
    for (const layout::MeshAxis& axis : mesh_.axes()) {
      names.push_back(axis.name);
    }
    for (const auto& [axis, placement] : rule.placements) {
      HS_CHECK(
          mesh_.has_axis(axis),
          "plan: ",
          rule,
          ": there is no mesh axis '",
          axis,
          "' (expected one of ",
          names,
          ")",
          HS_HINT(suggestion(axis, names))
      );
    }
  }

  bool match_parameters(const PlanRule& rule) {
    const Glob glob(rule.pattern);
    bool hit = false;
    stated_.resize(result_.parameters.size());
    for (std::size_t i = 0; i < result_.parameters.size(); ++i) {
      const MatchedParameter& parameter = result_.parameters[i];
      std::vector<std::string> names{parameter.name};
      names.insert(names.end(), parameter.aliases.begin(), parameter.aliases.end());
      for (const std::string& name : names) {
        if (glob.matches(name)) {
          hit = true;
          state(stated_[i], rule, name, "parameter '" + name + "'", mesh_);
        }
      }
    }
    return hit;
  }

  bool match_modules(const PlanRule& rule) {
    // The root's path is empty, which no pattern but ** says.
    const Glob glob(rule.pattern.empty() ? "**" : rule.pattern);
    bool hit = false;
    for (std::size_t i = 0; i < modules_.size(); ++i) {
      const NamedModule& each = modules_[i];
      const bool matches = each.path.empty() ? rule.pattern.empty() || rule.pattern == "**"
                                             : !rule.pattern.empty() && glob.matches(each.path);
      if (!matches) {
        continue;
      }
      hit = true;
      HS_CHECK(
          each.hooks != nullptr,
          "plan: ",
          rule,
          " matches module '",
          module_text(each.path),
          "' of type ",
          each.module->name(),
          ", which has no forward hooks",
          HS_HINT(
              "derive its Impl from nn::Hookable, build it as nn::Hooked<",
              each.module->name(),
              ">, or name the hookable module around it"
          )
      );
      const std::string of = each.path.empty() ? "the root" : "'" + each.path + "'";
      const auto subject = concat_text(rule.kind, " ", rule.index, " of ", of);
      state(sites_[{i, rule.kind, rule.index}], rule, each.path, subject, mesh_);
    }
    return hit;
  }

  [[noreturn]] void fail_unmatched(const PlanRule& rule) const {
    std::vector<std::string> paths;
    for (const NamedModule& each : modules_) {
      if (!each.path.empty()) {
        paths.push_back(each.path);
      }
    }
    const bool is_parameter = rule.kind == RuleKind::kParameter;
    const std::vector<std::string>& candidates = is_parameter ? names_ : paths;
    HS_FAIL(
        InvalidArgument,
        "plan: ",
        rule,
        " matches no ",
        is_parameter ? "parameter" : "module",
        "; the model has ",
        candidates.size(),
        ": ",
        candidates,
        HS_HINT(suggestion(rule.pattern, candidates))
    );
  }

  void settle_parameters() {
    stated_.resize(result_.parameters.size());
    for (std::size_t i = 0; i < result_.parameters.size(); ++i) {
      MatchedParameter& parameter = result_.parameters[i];
      auto& placements = parameter.spec.layout.placements;
      placements.resize(static_cast<std::size_t>(mesh_.num_axes()));
      for (std::size_t axis = 0; axis < stated_[i].size(); ++axis) {
        if (stated_[i][axis].has_value()) {
          placements[axis] = stated_[i][axis]->placement;
          check_dim(parameter, placements[axis], *stated_[i][axis]->rule);
        }
      }
    }
  }

  static void check_dim(
      const MatchedParameter& parameter, const Placement& placement, const PlanRule& rule
  ) {
    const auto rank = static_cast<int>(parameter.spec.shape.size());
    HS_CHECK(
        placement.kind != Placement::Kind::kShard || placement.dim < rank,
        "plan: ",
        rule,
        ": '",
        parameter.name,
        "' of shape ",
        parameter.spec.shape,
        " has no dimension ",
        placement.dim,
        HS_HINT("shard one of its ", rank, " dimensions, counted from 0")
    );
  }

  void settle_sites() {
    for (auto& [key, stated] : sites_) {
      const auto& [module, kind, index] = key;
      BoundarySite site{modules_[module].path, kind, index, {}, {}};
      for (const auto& slot : stated) {
        site.wanted.push_back(slot.has_value() ? std::optional(slot->placement) : std::nullopt);
        if (slot.has_value() && site.rule.empty()) {
          site.rule = to_text(*slot->rule);
        }
      }
      result_.sites.push_back(std::move(site));
    }
  }

  const ShardingPlan& plan_;
  const layout::DeviceMesh& mesh_;
  std::vector<NamedModule> modules_;
  std::vector<std::string> names_;
  std::map<const c10::TensorImpl*, std::size_t> by_tensor_;
  std::vector<StatedByAxis> stated_;  // by parameter
  std::map<std::tuple<std::size_t, RuleKind, int>, StatedByAxis> sites_;
  MatchedPlan result_;
};

}  // namespace

std::vector<NamedModule> named_modules(torch::nn::Module& model) {
  std::vector<NamedModule> modules;
  std::set<const torch::nn::Module*> seen;
  list_modules(model, "", seen, modules);
  return modules;
}

std::string module_text(const std::string& path) {
  return path.empty() ? "(root)" : path;
}

std::string to_text(const BoundarySite& site) {
  return concat_text(site.kind, " ", site.index, " of ", module_text(site.module));
}

MatchedPlan match_plan(
    const ShardingPlan& plan, torch::nn::Module& model, const layout::DeviceMesh& mesh
) {
  return Matcher(plan, model, mesh).run();
}

}  // namespace hypershard::plan
