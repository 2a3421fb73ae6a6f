// Hooks that call one function for each tensor that a plan's site names; resolving and production
// differ in what that function does.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hypershard/core/error.h"
#include "hypershard/nn/hooks.h"
#include "hypershard/plan/match.h"

namespace hypershard::plan::internal {

/// A boundary that a module does not have.
class SiteError final : public InvalidArgument {
 public:
  explicit SiteError(const ErrorText& text) : InvalidArgument(text) {}
};

/// Called with the number of a site and the tensor there, which it may replace.
using CrossSite = std::function<void(int site, at::Tensor& tensor)>;

/// The sites of one module, by number.
struct ModuleSites {
  std::vector<std::pair<int, BoundarySite>> inputs;
  std::vector<std::pair<int, BoundarySite>> outputs;
};

/// Hooks on a model's modules, removed when destroyed. The model must outlive it.
class SiteHooks {
 public:
  /// Adds hooks to exactly the modules that have sites. `sites` pairs each site with its number.
  /// Errors: InternalError for a module that is not in the model. During a forward:
  /// InvalidArgument if a site's index is beyond the module's tensors, or the tensor undefined.
  SiteHooks(
      torch::nn::Module& model,
      const std::vector<std::pair<int, BoundarySite>>& sites,
      const CrossSite& cross
  );
  ~SiteHooks();
  SiteHooks(SiteHooks&&) = default;
  SiteHooks& operator=(SiteHooks&&) = delete;
  SiteHooks(const SiteHooks&) = delete;
  SiteHooks& operator=(const SiteHooks&) = delete;

  std::size_t num_hooked_modules() const { return hooked_.size(); }

 private:
  std::vector<std::pair<nn::HookPoint*, std::shared_ptr<nn::ForwardHooks>>> hooked_;
};

}  // namespace hypershard::plan::internal
