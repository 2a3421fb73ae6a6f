// Runs bound steps one after another, and derives the gradient's program.
// NOTE [scale of averages]: the gradient of a rank's term of an average over n ranks is 1/n of the
// value's gradient; a program's gradient divides for the source's averages and multiplies for the
// target's.
#include "hypershard/dtensor/internal/step_program.h"

#include <cstddef>
#include <utility>

#include "hypershard/core/error.h"
#include "hypershard/layout/sharding.h"

namespace hypershard::dtensor::internal {
namespace {

using layout::Placement;

/// Returns the product of the sizes of the axes on which `layout` is an average.
double averaged_ranks(const layout::Layout& layout, const layout::DeviceMesh& mesh) {
  double product = 1;
  for (std::size_t axis = 0; axis < layout.placements.size(); ++axis) {
    product *= layout.placements[axis] == Placement::partial(Placement::Reduce::kAvg)
                   ? mesh.axes()[axis].size
                   : 1;
  }
  return product;
}

void check_differentiable(
    const layout::Layout& layout,
    std::string_view which,
    const ProgramText& text,
    const layout::DeviceMesh& mesh
) {
  for (std::size_t axis = 0; axis < layout.placements.size(); ++axis) {
    const Placement& placement = layout.placements[axis];
    const bool is_linear = placement.kind != Placement::Kind::kPartial ||
                           placement.reduce == Placement::Reduce::kSum ||
                           placement.reduce == Placement::Reduce::kAvg;
    HS_SUPPORTED(
        is_linear || mesh.axes()[axis].size == 1,
        "dtensor.redistribution: no gradient through [",
        to_text(text.source.layout, mesh),
        "] -> [",
        to_text(text.target, mesh),
        "]: the ",
        which,
        " is ",
        placement,
        " on axis '",
        mesh.axes()[axis].name,
        "', which is not linear",
        HS_HINT("detach the tensor, or redistribute it under a NoGradGuard")
    );
  }
}

}  // namespace

StepProgram::StepProgram(ProgramText text, std::shared_ptr<const comm::ProcessMesh> mesh)
    : text_(std::move(text)), mesh_(std::move(mesh)) {
  HS_CHECK(mesh_ != nullptr, "dtensor.redistribution: the process mesh is null");
  const layout::DeviceMesh& devices = mesh_->mesh();
  steps_ =
      layout::plan_redistribution(text_.source.shape, text_.source.layout, text_.target, devices);
  for (const layout::RedistributionStep& step : steps_) {
    bound_.push_back(bind_step(step, text_.source.shape, *mesh_, text_.unit));
  }
  local_shape_ = layout::local_shape(text_.source, devices, mesh_->rank());
}

void StepProgram::check_local(const at::Tensor& local) const {
  HS_CHECK(
      local.defined() && local.sizes() == at::IntArrayRef(local_shape_),
      "dtensor.redistribution: ",
      text_.unit.empty() ? "" : "'" + text_.unit + "': ",
      "the local tensor ",
      local.defined() ? concat_text("of shape ", local.sizes()) : "is undefined and",
      " is not what rank ",
      mesh_->rank(),
      " holds of a tensor of shape ",
      text_.source.shape,
      " under [",
      to_text(text_.source.layout, mesh_->mesh()),
      "] (expected ",
      local_shape_,
      ")"
  );
}

at::Tensor StepProgram::run(const at::Tensor& local, bool is_owned) const {
  check_local(local);
  at::Tensor current = local;
  for (const auto& step : bound_) {
    current = step->run(current, is_owned);
  }
  if (text_.scale != 1) {
    current = is_owned ? current.mul_(text_.scale) : current.mul(text_.scale);
  }
  // A part of a wider tensor: the code behind a boundary may ask for views that only the whole has.
  return bound_.empty() ? current : current.contiguous();
}

const StepProgram& StepProgram::backward() const {
  return static_cast<const StepProgram&>(*gradient());
}

std::shared_ptr<const LocalMap> StepProgram::make_gradient() const {
  const layout::DeviceMesh& mesh = mesh_->mesh();
  check_differentiable(text_.source.layout, "source", text_, mesh);
  check_differentiable(text_.target, "target", text_, mesh);
  ProgramText text;
  text.source = {.shape = text_.source.shape, .layout = text_.gradient_of_target};
  text.target = text_.gradient_of_source;
  text.gradient_of_target = layout::gradient_layout(text.target);
  text.gradient_of_source = layout::gradient_layout(text.source.layout);
  text.scale =
      text_.scale * averaged_ranks(text_.target, mesh) / averaged_ranks(text_.source.layout, mesh);
  text.unit = text_.unit;
  return std::make_shared<StepProgram>(std::move(text), mesh_);
}

}  // namespace hypershard::dtensor::internal
