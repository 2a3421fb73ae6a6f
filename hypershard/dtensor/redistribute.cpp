// The public face of step programs.
// Nothing is cached between calls: who redistributes often keeps the object.
#include "hypershard/dtensor/redistribute.h"

#include <utility>

#include "hypershard/comm/world.h"
#include "hypershard/core/error.h"
#include "hypershard/dtensor/internal/step_program.h"
#include "hypershard/layout/sharding.h"

namespace hypershard::dtensor {
namespace {

/// Checks the gradient's layouts now: their own plan is made when the first gradient comes.
void check_gradients(const internal::ProgramText& text, const comm::ProcessMesh& mesh) {
  check_spec({.shape = text.source.shape, .layout = text.gradient_of_target}, mesh.mesh());
  check_spec({.shape = text.source.shape, .layout = text.gradient_of_source}, mesh.mesh());
}

std::shared_ptr<const internal::StepProgram> make_program(
    layout::TensorSpec source,
    layout::Layout target,
    std::shared_ptr<const comm::ProcessMesh> mesh,
    const GradientLayouts& gradients,
    std::string unit
) {
  internal::ProgramText text;
  text.gradient_of_target = gradients.output.value_or(layout::gradient_layout(target));
  text.gradient_of_source = gradients.input.value_or(layout::gradient_layout(source.layout));
  text.source = std::move(source);
  text.target = std::move(target);
  text.unit = std::move(unit);
  auto program = std::make_shared<internal::StepProgram>(std::move(text), mesh);
  check_gradients(program->text(), *mesh);
  return program;
}

}  // namespace

Redistribution::Redistribution(
    layout::TensorSpec source,
    layout::Layout target,
    std::shared_ptr<const comm::ProcessMesh> mesh,
    const GradientLayouts& gradients,
    std::string unit
)
    : target_{.shape = source.shape, .layout = target},
      program_(make_program(
          std::move(source), std::move(target), std::move(mesh), gradients, std::move(unit)
      )) {}

at::Tensor Redistribution::operator()(const at::Tensor& local) const {
  return internal::apply_map(program_, local);
}

at::Tensor Redistribution::operator()(at::Tensor&& local) const {
  return internal::apply_map(program_, std::move(local));
}

const layout::TensorSpec& Redistribution::source() const {
  return program_->text().source;
}

std::span<const layout::RedistributionStep> Redistribution::steps() const {
  return program_->steps();
}

std::span<const layout::RedistributionStep> Redistribution::backward_steps() const {
  return program_->backward().steps();
}

at::Tensor redistribute(
    const at::Tensor& local,
    const layout::TensorSpec& source,
    const layout::Layout& target,
    const std::shared_ptr<const comm::ProcessMesh>& mesh,
    const GradientLayouts& gradients
) {
  return Redistribution(source, target, mesh, gradients)(local);
}

}  // namespace hypershard::dtensor
