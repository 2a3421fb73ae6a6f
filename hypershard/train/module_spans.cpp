// See module_spans.h.
#include "hypershard/train/module_spans.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include "hypershard/core/clock.h"
#include "hypershard/core/trace.h"
#include "hypershard/nn/hooks.h"

namespace hypershard::train {
namespace {

/// The backward of one call of a module.
struct BackwardSpan {
  std::string path;
  std::int64_t begin_ns = -1;
};

/// Returns when the gradient of this tensor came. Modules around one another share tensors; their
/// hooks run one after another, and must not seem to begin or end in that order.
std::int64_t time_of_gradient(const void* tensor) {
  constexpr std::int64_t kSameNs = 50'000;
  thread_local const void* last_tensor = nullptr;
  thread_local std::int64_t last_ns = 0;
  const std::int64_t now = now_ns();
  if (tensor != last_tensor || now - last_ns > kSameNs) {
    last_tensor = tensor;
    last_ns = now;
  }
  return last_ns;
}

template <class Body>
void when_gradient_comes(const at::Tensor& tensor, const Body& body) {
  if (tensor.defined() && tensor.requires_grad()) {
    const void* identity = tensor.unsafeGetTensorImpl();
    tensor.register_hook([identity, body](const at::Tensor&) { body(time_of_gradient(identity)); });
  }
}

class ModuleSpans final : public nn::ForwardHooks {
 public:
  explicit ModuleSpans(std::string path) : path_(std::move(path)) {}

  void pre_forward(std::span<at::Tensor* const> inputs) override {
    calls_.emplace_back();
    if (!trace_enabled()) {
      return;
    }
    Call& call = calls_.back();
    call.backward = std::make_shared<BackwardSpan>(BackwardSpan{.path = path_});
    for (const at::Tensor* input : inputs) {
      when_gradient_comes(*input, [backward = call.backward](std::int64_t at_ns) {
        if (backward->begin_ns >= 0) {
          trace_span(
              {.lane = TraceLane::kCompute,
               .name = "backward ",
               .path = backward->path,
               .begin_ns = std::exchange(backward->begin_ns, -1),
               .end_ns = at_ns}
          );
        }
      });
    }
    call.forward.begin();
  }
  void post_forward(std::span<at::Tensor* const> outputs) override {
    Call call = std::move(calls_.back());
    calls_.pop_back();
    call.forward.end(TraceLane::kCompute, "forward ", path_);
    if (call.backward != nullptr) {
      for (const at::Tensor* output : outputs) {
        when_gradient_comes(*output, [backward = call.backward](std::int64_t at_ns) {
          backward->begin_ns = at_ns;
        });
      }
    }
  }
  void forward_failed() noexcept override { calls_.pop_back(); }

 private:
  struct Call {
    OpenSpan forward;
    std::shared_ptr<BackwardSpan> backward;
  };
  std::string path_;
  std::vector<Call> calls_;  // running forwards, outermost first
};

}  // namespace

void add_module_spans(torch::nn::Module& root, const std::vector<std::string>& but) {
  for (const auto& item : root.named_modules("", /*include_self=*/false)) {
    auto* point = dynamic_cast<nn::HookPoint*>(item.value().get());
    if (point != nullptr && std::find(but.begin(), but.end(), item.key()) == but.end()) {
      point->add_forward_hooks(std::make_shared<ModuleSpans>(item.key()));
    }
  }
}

}  // namespace hypershard::train
