// Capture and restore of default generators and autocast settings.
#include "hypershard/nn/internal/ambient_state.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

namespace hypershard::nn::internal {

AmbientState AmbientState::capture(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Device> devices = {at::Device(at::kCPU)};
  for (const auto& tensor : tensors) {
    if (!tensor.defined() || tensor.device().is_cpu() || tensor.device().is_meta()) {
      continue;
    }
    if (std::find(devices.begin(), devices.end(), tensor.device()) == devices.end()) {
      devices.push_back(tensor.device());
    }
  }
  AmbientState state;
  for (const auto& device : devices) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    state.generators_.push_back({generator, generator.get_state()});
  }
  state.autocast_ = at::autocast::is_autocast_enabled(at::kCPU);
  state.autocast_dtype_ = at::autocast::get_autocast_dtype(at::kCPU);
  state.autocast_cache_ = at::autocast::is_autocast_cache_enabled();
  return state;
}

void AmbientState::restore() const {
  for (const auto& [generator, generator_state] : generators_) {
    at::Generator writable = generator;
    const std::lock_guard lock(writable.mutex());
    writable.set_state(generator_state);
  }
  at::autocast::set_autocast_enabled(at::kCPU, autocast_);
  at::autocast::set_autocast_dtype(at::kCPU, autocast_dtype_);
  at::autocast::set_autocast_cache_enabled(autocast_cache_);
}

}  // namespace hypershard::nn::internal
