// Redistribution of plain local tensors, with gradients: what plans run at boundaries and what
// DTensor stands on.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>

#include <ATen/core/Tensor.h>

#include "hypershard/comm/fwd.h"
#include "hypershard/layout/redistribution.h"
#include "hypershard/layout/tensor_spec.h"

namespace hypershard::dtensor {

namespace internal {
class StepProgram;
}

/// The layouts of the gradient in backward. Unset: `layout::gradient_layout` of the target and of
/// the source. Stated ones say what autograd brings and what the operators before expect, e.g. a
/// Partial gradient of a replicated tensor that sharded operators used.
struct GradientLayouts {
  std::optional<layout::Layout> output = {};  ///< as the gradient of the result arrives
  std::optional<layout::Layout> input = {};   ///< as the gradient of the local tensor leaves
};

/// A redistribution with its steps, communicators and counts resolved once, for one global shape.
///
/// Copies of an object share what was resolved. Threads: the communicators' thread.
class Redistribution {
 public:
  /// Collective: all ranks of the mesh, with equal arguments, in one order (groups of several axes
  /// are made at their first use). `unit` names the place in the collective log and in messages.
  /// Errors: InvalidArgument as layout::plan_redistribution, for the gradient's layouts too.
  Redistribution(
      layout::TensorSpec source,
      layout::Layout target,
      std::shared_ptr<const comm::ProcessMesh> mesh,
      const GradientLayouts& gradients = {},
      std::string unit = {}
  );

  /// Returns what this rank holds under the target layout.
  ///
  /// Shapes: `local` as layout::local_shape(source) on this rank; the result as that of the target,
  /// contiguous unless nothing was to do. Dtype: any; reductions need a floating one. Memory: the
  /// result may be `local` itself or a view of it where nothing but a cut was to do. Autograd:
  /// backward runs the gradient's steps; it may be differentiated again. Collective: all ranks of
  /// the mesh, and in backward all ranks too.
  /// Errors: InvalidArgument for another shape; Unsupported where a gradient is asked for through
  /// a Partial maximum or minimum; CommError.
  at::Tensor operator()(const at::Tensor& local) const;
  /// The same for a tensor that the caller gives away: if nobody else holds it, a reduction takes
  /// place in its memory.
  at::Tensor operator()(at::Tensor&& local) const;

  const layout::TensorSpec& source() const;
  const layout::TensorSpec& target() const { return target_; }
  /// The steps of forward, equal on all ranks; empty: nothing to do.
  std::span<const layout::RedistributionStep> steps() const;
  /// The steps of backward. Collective when first called (also by the first call with a gradient).
  /// Errors: Unsupported as operator().
  std::span<const layout::RedistributionStep> backward_steps() const;

 private:
  layout::TensorSpec target_;
  std::shared_ptr<const internal::StepProgram> program_;
};

/// Resolves and runs a Redistribution at once. Collective. Errors: as Redistribution.
at::Tensor redistribute(
    const at::Tensor& local,
    const layout::TensorSpec& source,
    const layout::Layout& target,
    const std::shared_ptr<const comm::ProcessMesh>& mesh,
    const GradientLayouts& gradients = {}
);

}  // namespace hypershard::dtensor
