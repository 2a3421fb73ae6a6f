// See site_hooks.h.
#include "hypershard/plan/internal/site_hooks.h"

#include <map>

#include "hypershard/core/error.h"

namespace hypershard::plan::internal {
namespace {

class CrossingHooks final : public nn::ForwardHooks {
 public:
  CrossingHooks(ModuleSites sites, CrossSite cross)
      : sites_(std::move(sites)), cross_(std::move(cross)) {}
  void pre_forward(std::span<at::Tensor* const> inputs) override { visit(sites_.inputs, inputs); }
  void post_forward(std::span<at::Tensor* const> outputs) override {
    visit(sites_.outputs, outputs);
  }

 private:
  void visit(
      const std::vector<std::pair<int, BoundarySite>>& sites, std::span<at::Tensor* const> tensors
  ) {
    for (const auto& [number, site] : sites) {
      const auto index = static_cast<std::size_t>(site.index);
      if (index >= tensors.size()) {
        HS_FAIL(
            SiteError,
            "plan: ",
            site,
            ": the module has ",
            tensors.size(),
            tensors.size() == 1 ? " tensor there" : " tensors there",
            HS_HINT("count the tensors of its arguments or results from 0, undefined ones too")
        );
      }
      if (!tensors[index]->defined()) {
        HS_FAIL(
            SiteError,
            "plan: ",
            site,
            " is an undefined tensor",
            HS_HINT("state a boundary only for tensors that are always there")
        );
      }
      cross_(number, *tensors[index]);
    }
  }

  ModuleSites sites_;
  CrossSite cross_;
};

}  // namespace

SiteHooks::SiteHooks(
    torch::nn::Module& model,
    const std::vector<std::pair<int, BoundarySite>>& sites,
    const CrossSite& cross
) {
  std::map<std::string, ModuleSites> by_module;
  for (const auto& each : sites) {
    ModuleSites& module = by_module[each.second.module];
    (each.second.kind == RuleKind::kInput ? module.inputs : module.outputs).push_back(each);
  }
  for (const NamedModule& each : named_modules(model)) {
    const auto found = by_module.find(each.path);
    if (found == by_module.end()) {
      continue;
    }
    HS_ASSERT(each.hooks != nullptr, "plan: module ", each.path, " has no forward hooks");
    auto hooks = std::make_shared<CrossingHooks>(std::move(found->second), cross);
    each.hooks->add_forward_hooks(hooks);
    hooked_.emplace_back(each.hooks, std::move(hooks));
    by_module.erase(found);
  }
  HS_ASSERT(by_module.empty(), "plan: module ", by_module.begin()->first, " is not in this model");
}

SiteHooks::~SiteHooks() {
  for (auto& [point, hooks] : hooked_) {
    point->remove_forward_hooks(hooks.get());
  }
}

}  // namespace hypershard::plan::internal
