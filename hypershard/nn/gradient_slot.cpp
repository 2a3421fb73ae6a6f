// The table from parameters to gradient slots.
#include "hypershard/nn/gradient_slot.h"

#include <cstddef>
#include <memory>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include "hypershard/core/error.h"
#include "hypershard/nn/internal/parameter_table.h"

namespace hypershard::nn {
namespace {

using SlotTable = internal::ParameterTable<std::weak_ptr<GradientSlot>>;

// Never destroyed: parameters with static lifetime may outlive any order of destruction.
SlotTable& slot_table() {
  static auto* table = new SlotTable;
  return *table;
}

}  // namespace

void set_gradient_slot(const at::Tensor& param, const std::shared_ptr<GradientSlot>& slot) {
  HS_CHECK(param.defined(), "nn.gradient_slot: the parameter is an undefined tensor");
  slot_table().set(param, slot);
}

std::shared_ptr<GradientSlot> slot_of(const at::Tensor& param) {
  return slot_table().find(param);
}

namespace internal {

GradientSlot::Claim claim_slot(const at::Tensor& param) {
  const auto slot = slot_of(param);
  if (slot == nullptr) {
    return {};
  }
  HS_SUPPORTED(
      !at::GradMode::is_enabled(),
      "nn.gradient_slot: backward with create_graph=true can not write the gradient of a parameter "
      "of shape ",
      param.sizes(),
      " into its slot",
      HS_HINT("detach the slots (unshard without the engine) for second derivatives")
  );
  auto claim = slot->claim();
  if (claim.destination.defined()) {
    HS_CHECK(
        claim.destination.sizes() == param.sizes() && claim.destination.is_contiguous(),
        "nn.gradient_slot: the slot's destination does not fit its parameter: shape ",
        claim.destination.sizes(),
        ", strides ",
        claim.destination.strides(),
        " (expected contiguous ",
        param.sizes(),
        ")"
    );
  }
  return claim;
}

std::size_t slot_table_size() {
  return slot_table().size();
}

}  // namespace internal
}  // namespace hypershard::nn
