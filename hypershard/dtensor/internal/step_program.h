// A planned redistribution bound to this rank: communicators, boxes and counts of every step, made
// once. Running it does nothing but the copies and collectives.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "hypershard/comm/world.h"
#include "hypershard/dtensor/internal/local_map.h"
#include "hypershard/layout/redistribution.h"
#include "hypershard/layout/tensor_spec.h"

namespace hypershard::dtensor::internal {

/// One step on this rank. `is_owned`: the tensor is a fresh one that may be written to; updated.
class BoundStep {
 public:
  virtual ~BoundStep() = default;
  virtual at::Tensor run(const at::Tensor& local, bool& is_owned) const = 0;
};

/// Binds a step. Collective where the step's group is used for the first time.
std::unique_ptr<BoundStep> bind_step(
    const layout::RedistributionStep& step,
    const std::vector<std::int64_t>& shape,
    const comm::ProcessMesh& mesh,
    const std::string& unit
);

/// What defines a program: two layouts of one tensor, and those of the gradient going back.
struct ProgramText {
  layout::TensorSpec source;
  layout::Layout target;
  layout::Layout gradient_of_target;  ///< as it arrives in backward
  layout::Layout gradient_of_source;  ///< as it leaves
  double scale = 1;                   ///< of the result
  std::string unit = {};
};

/// The steps of a redistribution, and of its gradient.
class StepProgram : public LocalMap {
 public:
  /// Collective. Errors: as plan_redistribution.
  StepProgram(ProgramText text, std::shared_ptr<const comm::ProcessMesh> mesh);

  at::Tensor run(const at::Tensor& local, bool is_owned) const override;
  const ProgramText& text() const { return text_; }
  const std::vector<layout::RedistributionStep>& steps() const { return steps_; }
  const StepProgram& backward() const;

 protected:
  std::shared_ptr<const LocalMap> make_gradient() const override;

 private:
  void check_local(const at::Tensor& local) const;

  ProgramText text_;
  std::shared_ptr<const comm::ProcessMesh> mesh_;
  std::vector<layout::RedistributionStep> steps_;
  std::vector<std::unique_ptr<BoundStep>> bound_;
  std::vector<std::int64_t> local_shape_;
};

}  // namespace hypershard::dtensor::internal
