// DTensor and distribute. from_local has a file of its own.
#include "hypershard/dtensor/dtensor.h"

#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "hypershard/comm/world.h"
#include "hypershard/core/error.h"
#include "hypershard/layout/sharding.h"

namespace hypershard::dtensor {
namespace {

/// Returns rank 0's values on all ranks, outside autograd; never writes the caller's tensor.
at::Tensor broadcast_whole(const at::Tensor& tensor, const comm::ProcessMesh& mesh) {
  const at::NoGradGuard no_grad;
  const auto all = mesh.world().world_communicator();
  at::Tensor values =
      all->rank() == 0 ? tensor.detach().contiguous() : at::empty(tensor.sizes(), tensor.options());
  all->broadcast(values, 0, "distribute")->wait();
  return values;
}

}  // namespace

DTensor::DTensor(
    at::Tensor local, layout::TensorSpec spec, std::shared_ptr<const comm::ProcessMesh> mesh
)
    : local_(std::move(local)), spec_(std::move(spec)), mesh_(std::move(mesh)) {
  HS_CHECK(mesh_ != nullptr, "dtensor: the process mesh is null");
  HS_CHECK(local_.defined(), "dtensor: the local tensor is undefined");
  const auto expected = layout::local_shape(spec_, mesh_->mesh(), mesh_->rank());
  HS_CHECK(
      local_.sizes() == at::IntArrayRef(expected),
      "dtensor: a local tensor of shape ",
      local_.sizes(),
      " is not what rank ",
      mesh_->rank(),
      " holds of a tensor of shape ",
      spec_.shape,
      " under [",
      to_text(spec_.layout, mesh_->mesh()),
      "] (expected ",
      expected,
      ")",
      HS_HINT("from_local without a shape takes pieces of any size")
  );
}

DTensor DTensor::redistribute(const layout::Layout& target, const GradientLayouts& gradients)
    const {
  const Redistribution move(spec_, target, mesh_, gradients);
  return DTensor(move(local_), move.target(), mesh_);
}

at::Tensor DTensor::full_tensor(const GradientLayouts& gradients) const {
  return redistribute(layout::replicated_layout(mesh_->mesh()), gradients).to_local();
}

std::string to_text(const DTensor& tensor) {
  return concat_text(
      "DTensor ",
      tensor.shape(),
      " ",
      c10::toString(tensor.to_local().scalar_type()),
      " on ",
      tensor.mesh()->mesh(),
      ": ",
      to_text(tensor.layout(), tensor.mesh()->mesh())
  );
}

DTensor distribute(
    const at::Tensor& tensor,
    const layout::Layout& layout,
    const std::shared_ptr<const comm::ProcessMesh>& mesh,
    const DistributeOptions& options
) {
  HS_CHECK(mesh != nullptr, "dtensor.distribute: the process mesh is null");
  HS_CHECK(tensor.defined(), "dtensor.distribute: the tensor is undefined");
  const at::Tensor whole = options.broadcast ? broadcast_whole(tensor, *mesh) : tensor;
  const DTensor replicated(
      whole, {.shape = whole.sizes().vec(), .layout = layout::replicated_layout(mesh->mesh())}, mesh
  );
  DTensor part = replicated.redistribute(layout);
  const at::Tensor& local = part.to_local();
  // A part must not keep the whole alive.
  const bool is_view = local.numel() < whole.numel() && local.is_alias_of(whole);
  return is_view ? DTensor(local.clone(), part.spec(), mesh) : part;
}

}  // namespace hypershard::dtensor
