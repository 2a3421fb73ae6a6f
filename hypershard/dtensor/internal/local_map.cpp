// One autograd function for all maps. Backward runs the collective of the gradient map also where
// this rank's gradient is zero: peers wait for it.
#include "hypershard/dtensor/internal/local_map.h"

#include <utility>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

namespace hypershard::dtensor::internal {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Carries a map through the context's values.
struct MapHolder : torch::CustomClassHolder {
  explicit MapHolder(std::shared_ptr<const LocalMap> map_in) : map(std::move(map_in)) {}
  std::shared_ptr<const LocalMap> map;
};

constexpr const char* kMap = "map";

struct MapFunction : torch::autograd::Function<MapFunction> {
  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& local,
      const std::shared_ptr<const LocalMap>& map,
      bool is_owned
  ) {
    ctx->saved_data[kMap] = c10::IValue::make_capsule(c10::make_intrusive<MapHolder>(map));
    // Another tensor over the same memory: autograd would take `local` itself for an untouched
    // input.
    return map->run(is_owned ? local.variable_data() : local, is_owned);
  }

  // The list is the node's own, so a gradient that nobody else waits for can be taken from it.
  static variable_list backward(AutogradContext* ctx, variable_list& grads) {
    const auto holder =
        c10::static_intrusive_pointer_cast<MapHolder>(ctx->saved_data.at(kMap).toCapsule());
    return {apply_map(holder->map->gradient(), std::move(grads[0])), at::Tensor(), at::Tensor()};
  }
};

// Saved tensors of autograd, views and gradients on their way elsewhere all count as users.
bool is_sole_user(const at::Tensor& tensor) {
  return tensor.use_count() == 1 && tensor.has_storage() && tensor.storage().use_count() == 1 &&
         tensor.is_contiguous();
}

}  // namespace

const std::shared_ptr<const LocalMap>& LocalMap::gradient() const {
  if (gradient_ == nullptr) {
    gradient_ = make_gradient();
  }
  return gradient_;
}

at::Tensor apply_map(const std::shared_ptr<const LocalMap>& map, at::Tensor local) {
  const bool is_owned = is_sole_user(local);
  if (at::GradMode::is_enabled() && local.requires_grad()) {
    map->gradient();  // refuses maps without one before anything runs
    return MapFunction::apply(local, map, is_owned);
  }
  const at::NoGradGuard no_grad;
  return map->run(local, is_owned);
}

}  // namespace hypershard::dtensor::internal
