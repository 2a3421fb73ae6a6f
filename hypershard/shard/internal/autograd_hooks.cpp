// See autograd_hooks.h.
#include "hypershard/shard/internal/autograd_hooks.h"

#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace hypershard::shard::internal {

namespace {

using torch::autograd::variable_list;

class EventHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit EventHook(Event event) : event_(std::move(event)) {}
  variable_list operator()(const variable_list& gradients) override {
    (*event_)();
    return gradients;
  }

 private:
  Event event_;
};

class TakeHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit TakeHook(std::function<void(const at::Tensor&)> hook) : hook_(std::move(hook)) {}
  variable_list operator()(const variable_list& gradients) override {
    hook_(gradients.empty() ? at::Tensor() : gradients[0]);
    return variable_list(gradients.size());
  }

 private:
  std::function<void(const at::Tensor&)> hook_;
};

}  // namespace

void before_backward_of(const at::Tensor& tensor, const Event& event) {
  if (!tensor.defined() || !tensor.requires_grad()) {
    return;
  }
  if (const auto& node = tensor.grad_fn()) {
    node->add_pre_hook(std::make_unique<EventHook>(event));
  }
  if (tensor.is_view()) {
    const auto& base = tensor._base();
    if (const auto& node = base.grad_fn()) {
      node->add_pre_hook(std::make_unique<EventHook>(event));
    }
  }
}

std::shared_ptr<void> take_gradients_of(
    const at::Tensor& leaf, std::function<void(const at::Tensor&)> hook
) {
  auto node = torch::autograd::impl::grad_accumulator(leaf);
  node->add_pre_hook(std::make_unique<TakeHook>(std::move(hook)));
  return std::make_shared<decltype(node)>(std::move(node));
}

void at_end_of_backward(std::function<void()> callback) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(callback));
}

bool backward_is_running() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

}  // namespace hypershard::shard::internal
