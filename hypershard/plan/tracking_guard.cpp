// The seam to libtorch: a boxed fallback on the mode key above autograd, switched on by thread.
// An exception thrown from it reaches the caller of the operator, in forward and in backward.
#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>
#include <torch/nn/module.h>

#include "hypershard/core/error.h"
#include "hypershard/nn/hooks.h"
#include "hypershard/plan/match.h"
#include "hypershard/plan/tracker.h"

namespace hypershard::plan {

namespace {

thread_local LayoutTracker* thread_tracker = nullptr;

void track(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(nn::kWatchKey);
  if (thread_tracker != nullptr) {
    thread_tracker->run(op, stack);
  } else {
    op.callBoxed(stack);
  }
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&track>());
}

std::vector<at::Tensor> handles(std::span<at::Tensor* const> tensors) {
  std::vector<at::Tensor> list;
  for (const at::Tensor* tensor : tensors) {
    list.push_back(*tensor);
  }
  return list;
}

// Tells the tracker where the program is.
class PathHooks final : public nn::ForwardHooks {
 public:
  PathHooks(LayoutTracker& tracker, std::string path) : tracker_(tracker), path_(std::move(path)) {}
  void pre_forward(std::span<at::Tensor* const> inputs) override {
    tracker_.enter_module(path_, handles(inputs));
  }
  void post_forward(std::span<at::Tensor* const> outputs) override {
    tracker_.leave_module(handles(outputs));
  }
  void forward_failed() noexcept override { tracker_.abandon_module(); }

 private:
  LayoutTracker& tracker_;
  std::string path_;
};

}  // namespace

struct TrackingGuard::Impl {
  explicit Impl(LayoutTracker& tracker) {
    HS_CHECK(
        thread_tracker == nullptr,
        "plan: this thread (rank ",
        tracker.rank(),
        ") has a tracker already",
        HS_HINT("let the earlier guard end before the next one begins")
    );
    thread_tracker = &tracker;
  }
  ~Impl() {
    for (auto& [point, hooks] : hooked) {
      point->remove_forward_hooks(hooks.get());
    }
    thread_tracker = nullptr;
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  std::vector<std::pair<nn::HookPoint*, std::shared_ptr<nn::ForwardHooks>>> hooked;
  c10::impl::IncludeDispatchKeyGuard include{nn::kWatchKey};
};

TrackingGuard::TrackingGuard(LayoutTracker& tracker, torch::nn::Module& model)
    : impl_(std::make_unique<Impl>(tracker)) {
  for (const NamedModule& each : named_modules(model)) {
    if (each.hooks != nullptr) {
      auto hooks = std::make_shared<PathHooks>(tracker, module_text(each.path));
      each.hooks->add_forward_hooks(hooks);
      impl_->hooked.emplace_back(each.hooks, std::move(hooks));
    }
  }
}

TrackingGuard::~TrackingGuard() = default;

LayoutTracker* current_tracker() {
  return thread_tracker;
}

}  // namespace hypershard::plan
