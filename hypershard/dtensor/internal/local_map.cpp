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
      AutogradContext* ctx, const at::Tensor& local, const std::shared_ptr<const LocalMap>& map
  ) {
    ctx->saved_data[kMap] = c10::IValue::make_capsule(c10::make_intrusive<MapHolder>(map));
    return map->run(local);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto holder =
        c10::static_intrusive_pointer_cast<MapHolder>(ctx->saved_data.at(kMap).toCapsule());
    return {apply_map(holder->map->gradient(), grads[0]), at::Tensor()};
  }
};

}  // namespace

const std::shared_ptr<const LocalMap>& LocalMap::gradient() const {
  if (gradient_ == nullptr) {
    gradient_ = make_gradient();
  }
  return gradient_;
}

at::Tensor apply_map(const std::shared_ptr<const LocalMap>& map, const at::Tensor& local) {
  if (at::GradMode::is_enabled() && local.requires_grad()) {
    map->gradient();  // refuses maps without one before anything runs
    return MapFunction::apply(local, map);
  }
  const at::NoGradGuard no_grad;
  return map->run(local);
}

}  // namespace hypershard::dtensor::internal
