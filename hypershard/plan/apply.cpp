// See apply.h.
#include "hypershard/plan/apply.h"

#include <algorithm>
#include <map>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/nn/module.h>

#include "hypershard/core/error.h"
#include "hypershard/core/suggest.h"
#include "hypershard/dtensor/redistribute.h"
#include "hypershard/layout/sharding.h"
#include "hypershard/plan/internal/compiled_boundary.h"
#include "hypershard/plan/internal/cut_parameters.h"
#include "hypershard/plan/internal/row_parts.h"
#include "hypershard/plan/internal/site_hooks.h"
#include "hypershard/plan/tracker.h"

namespace hypershard::plan {

using layout::Range;

namespace {

thread_local BoundaryObserver* thread_observer = nullptr;

std::map<std::string, at::Tensor> tensors_by_name(torch::nn::Module& model) {
  std::map<std::string, at::Tensor> tensors;
  for (const NamedModule& each : named_modules(model)) {
    const std::string prefix = each.path.empty() ? "" : each.path + ".";
    for (const auto& item : each.module->named_parameters(false)) {
      tensors.emplace(prefix + item.key(), item.value());
    }
    for (const auto& item : each.module->named_buffers(false)) {
      tensors.emplace(prefix + item.key(), item.value());
    }
  }
  return tensors;
}

std::string axes_text(const std::vector<layout::MeshAxis>& axes) {
  std::string text;
  for (const layout::MeshAxis& axis : axes) {
    text += concat_text(text.empty() ? "" : ", ", axis.name, "=", axis.size);
  }
  return "mesh(" + text + ")";
}

// Gives the module's tensor its part of the whole; the whole is freed with its last user.
void cut(
    const at::Tensor& tensor, const ResolvedParameter& parameter, const comm::ProcessMesh& mesh
) {
  HS_CHECK(
      tensor.sizes() == at::IntArrayRef(parameter.spec.shape),
      "plan: parameter '",
      parameter.name,
      "' has shape ",
      tensor.sizes().vec(),
      ", the plan was resolved for ",
      parameter.spec.shape,
      HS_HINT("resolve and apply the plan on one model, once")
  );
  const auto shape = layout::local_shape(parameter.spec, mesh.mesh(), mesh.rank());
  if (tensor.sizes() == at::IntArrayRef(shape)) {
    return;
  }
  const at::NoGradGuard no_grad;
  at::Tensor part = tensor.variable_data();
  const auto offset = layout::local_offset(parameter.spec, mesh.mesh(), mesh.rank());
  for (std::size_t dim = 0; dim < shape.size(); ++dim) {
    part = part.narrow(static_cast<std::int64_t>(dim), offset[dim], shape[dim]);
  }
  at::Tensor handle = tensor;
  handle.set_data(part.clone(at::MemoryFormat::Contiguous));
  internal::note_cut(handle);
}

}  // namespace

BoundaryObserver* set_boundary_observer(BoundaryObserver* observer) {
  return std::exchange(thread_observer, observer);
}

struct AppliedPlan::State {
  ResolvedPlan resolved;
  std::shared_ptr<const comm::ProcessMesh> mesh;
  std::map<std::string, at::Tensor> tensors;  // the model's, by first name
  internal::RowParts parts;
  std::vector<std::unique_ptr<internal::CompiledBoundary>> boundaries;
  std::vector<std::pair<at::Tensor, unsigned>> gradient_hooks;
  std::unique_ptr<internal::SiteHooks> hooks;

  ~State() { remove(); }
  void remove() {
    hooks.reset();
    for (const auto& [tensor, position] : gradient_hooks) {
      tensor.remove_hook(position);
    }
    gradient_hooks.clear();
  }
  void check(const ApplyOptions& options) const;
  void cut_parameters(torch::nn::Module& model);
  void install_boundaries(torch::nn::Module& model);
  void install_reductions();
  void cross(internal::CompiledBoundary& boundary, at::Tensor& tensor) const;
};

void AppliedPlan::State::check(const ApplyOptions& options) const {
  HS_CHECK(
      options.allow_problems || resolved.problems.empty(),
      "plan: it has ",
      resolved.problems.size(),
      " problems, the first: ",
      resolved.problems.front(),
      HS_HINT(resolved.problems.front().fix)
  );
  // Steps and reductions leave out axes of one rank, so sizes count as much as names.
  const auto& axes = mesh->mesh().axes();
  const bool is_resolved_for = std::equal(
      axes.begin(),
      axes.end(),
      resolved.axes.begin(),
      resolved.axes.end(),
      [](const layout::MeshAxis& a, const layout::MeshAxis& b) {
        return a.name == b.name && a.size == b.size;
      }
  );
  HS_CHECK(
      is_resolved_for,
      "plan: it was resolved for ",
      axes_text(resolved.axes),
      " and cannot be installed on ",
      mesh->mesh(),
      HS_HINT("resolve the plan for the mesh that the model runs on")
  );
}

void AppliedPlan::State::cut_parameters(torch::nn::Module& model) {
  const auto found = tensors_by_name(model);
  std::vector<std::string> names;
  for (const auto& item : found) {
    names.push_back(item.first);
  }
  for (const ResolvedParameter& parameter : resolved.parameters) {
    const auto at = found.find(parameter.name);
    HS_CHECK(
        at != found.end(),
        "plan: the model has no parameter '",
        parameter.name,
        "', for which the plan was resolved",
        HS_HINT(suggestion(parameter.name, names))
    );
    cut(at->second, parameter, *mesh);
    parts.add(at->second, parameter.spec, mesh->mesh(), mesh->rank(), mesh.get());
    tensors.emplace(parameter.name, at->second);
  }
}

void AppliedPlan::State::install_boundaries(torch::nn::Module& model) {
  std::vector<std::pair<int, BoundarySite>> sites;
  std::map<std::ptrdiff_t, std::size_t> compiled;  // by number in the resolved plan
  for (const ResolvedBoundary& boundary : resolved.boundaries) {
    if (boundary.crossings > 0 && !boundary.is_identity()) {
      sites.emplace_back(static_cast<int>(boundaries.size()), boundary.site);
      compiled[&boundary - resolved.boundaries.data()] = boundaries.size();
      boundaries.push_back(std::make_unique<internal::CompiledBoundary>(boundary, mesh));
    }
  }
  for (const auto& boundary : boundaries) {
    const std::vector<CutOrigin>& origins = boundary->boundary().cut_by;
    for (std::size_t dim = 0; dim < origins.size(); ++dim) {
      const auto found = compiled.find(origins[dim].boundary);
      if (found != compiled.end()) {
        boundary->set_origin(
            dim, boundaries[found->second].get(), static_cast<std::size_t>(origins[dim].dim)
        );
      }
    }
  }
  hooks = std::make_unique<internal::SiteHooks>(model, sites, [this](int site, at::Tensor& tensor) {
    cross(*boundaries[static_cast<std::size_t>(site)], tensor);
  });
}

void AppliedPlan::State::cross(internal::CompiledBoundary& boundary, at::Tensor& tensor) const {
  BoundaryObserver* observer = thread_observer;
  if (observer == nullptr) [[likely]] {
    tensor = boundary.cross(std::move(tensor));
    return;
  }
  const TrackingPause pause;
  observer->before_boundary(boundary.boundary(), tensor);
  at::Tensor result = boundary.cross(tensor);
  if (result.is_same(tensor)) {
    result = tensor.view_as(tensor);  // other uses of the tensor keep the arriving layout
  }
  if (result.requires_grad()) {
    result.register_hook([observer, &boundary](const at::Tensor& gradient) {
      if (thread_observer == observer && gradient.defined()) {
        const TrackingPause no_tracking;
        observer->before_gradient(boundary.boundary(), gradient);
      }
    });
  }
  observer->after_boundary(boundary.boundary(), tensor, result);
  tensor = std::move(result);
}

void AppliedPlan::State::install_reductions() {
  for (const ResolvedParameter& parameter : resolved.parameters) {
    if (parameter.reduce_axes.empty()) {
      continue;
    }
    const at::Tensor& tensor = tensors.at(parameter.name);
    const auto ranks = mesh->axes(parameter.reduce_axes);
    const auto position =
        tensor.register_hook([ranks, &parameter](const at::Tensor& gradient) -> at::Tensor {
          const TrackingPause pause;
          if (thread_observer != nullptr) {
            thread_observer->before_reduction(parameter, gradient);
          }
          // The gradient may be another tensor's as well, so the sum gets memory of its own.
          at::Tensor sum = gradient.clone(at::MemoryFormat::Contiguous);
          ranks->all_reduce(sum, comm::ReduceOp::kSum, parameter.name)->wait();
          return sum;
        });
    gradient_hooks.emplace_back(tensor, position);
  }
}

const ResolvedPlan& AppliedPlan::resolved() const {
  return state_->resolved;
}

const std::shared_ptr<const comm::ProcessMesh>& AppliedPlan::mesh() const {
  return state_->mesh;
}

std::size_t AppliedPlan::num_hooked_modules() const {
  return state_->hooks == nullptr ? 0 : state_->hooks->num_hooked_modules();
}

std::size_t AppliedPlan::num_compiled_shapes() const {
  std::size_t count = 0;
  for (const auto& boundary : state_->boundaries) {
    count += boundary->num_compiled();
  }
  return count;
}

void AppliedPlan::remove() {
  state_->remove();
}

at::Tensor AppliedPlan::full_parameter(const std::string& name, bool gradient) const {
  const ResolvedParameter* parameter = resolved().find_parameter(name);
  HS_CHECK(
      parameter != nullptr,
      "plan: no parameter is called '",
      name,
      "'; the plan has ",
      resolved().parameters.size()
  );
  const TrackingPause pause;
  const at::NoGradGuard no_grad;
  const at::Tensor& handle = state_->tensors.at(parameter->name);
  const at::Tensor local = gradient ? handle.grad() : handle.variable_data();
  if (!local.defined()) {
    return {};
  }
  return dtensor::redistribute(
      local, parameter->spec, layout::replicated_layout(mesh()->mesh()), mesh()
  );
}

AppliedPlan apply_plan(
    torch::nn::Module& model,
    ResolvedPlan resolved,
    std::shared_ptr<const comm::ProcessMesh> mesh,
    const ApplyOptions& options
) {
  AppliedPlan applied;
  applied.state_ = std::make_shared<AppliedPlan::State>();
  AppliedPlan::State& state = *applied.state_;
  state.resolved = std::move(resolved);
  state.mesh = std::move(mesh);
  state.check(options);
  state.cut_parameters(model);
  state.install_boundaries(model);
  if (options.reduce_gradients) {
    state.install_reductions();
  }
  return applied;
}

AppliedPlan apply_plan(
    torch::nn::Module& model,
    const ShardingPlan& plan,
    std::shared_ptr<const comm::ProcessMesh> mesh,
    const std::vector<PlannedInput>& inputs,
    const ForwardRun& forward,
    const ResolveOptions& resolve_options,
    const ApplyOptions& options
) {
  ResolvedPlan resolved =
      resolve(model, plan, mesh->mesh(), mesh->rank(), inputs, forward, resolve_options);
  return apply_plan(model, std::move(resolved), std::move(mesh), options);
}

}  // namespace hypershard::plan
