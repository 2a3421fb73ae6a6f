// Operators and modules. Boundaries are in validator_boundaries.cpp, gradients in
// validator_gradients.cpp.
#include "hypershard/plan/internal/validator.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/nn/module.h>

#include "hypershard/core/error.h"
#include "hypershard/layout/sharding.h"
#include "hypershard/plan/internal/global_shape.h"

namespace hypershard::plan::internal {

using layout::Layout;
using layout::Placement;

bool in_backward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

namespace {

std::string result_name(std::size_t index, const std::string& of) {
  return concat_text("result ", index, " of ", of);
}

std::vector<c10::ScalarType> dtypes(c10::ArrayRef<at::Tensor> tensors) {
  std::vector<c10::ScalarType> list;
  for (const at::Tensor& tensor : tensors) {
    list.push_back(tensor.scalar_type());
  }
  return list;
}

// The generator that a random operator draws from; none if it draws nothing.
std::optional<at::Generator> generator_of(const SeenOperator& seen) {
  std::optional<at::Generator> generator;
  const auto& schema = seen.op.schema().arguments();
  for (std::size_t i = 0; i < seen.arguments.size(); ++i) {
    const c10::IValue& value = seen.arguments[i];
    if (value.isGenerator()) {
      generator = value.toGenerator();
    }
    const bool is_off = (schema[i].name() == "train" && value.isBool() && !value.toBool()) ||
                        ((schema[i].name() == "p" || schema[i].name() == "dropout_p") &&
                         value.isDouble() && value.toDouble() == 0.0);
    if (is_off) {
      return std::nullopt;
    }
  }
  return generator.has_value() ? generator : at::detail::getDefaultCPUGenerator();
}

}  // namespace

Validator::Validator(const AppliedPlan& applied, const ValidationOptions& options)
    : applied_(applied),
      options_(options),
      plan_(applied_.resolved()),
      mesh_(applied_.mesh()->mesh()),
      everyone_(validation_ranks(*applied_.mesh())),
      tracker_(mesh_, applied_.mesh()->rank(), *this),
      agreement_(everyone_, mesh_),
      collectives_(*applied_.mesh(), plan_) {
  for (const ResolvedBoundary& boundary : plan_.boundaries) {
    if (boundary.crossings > 0 && boundary.is_identity()) {
      identities_[module_text(boundary.site.module)].push_back(&boundary);
    }
  }
}

void Validator::begin(torch::nn::Module& model) {
  tracker_.begin_forward();
  std::map<std::string, at::Tensor> tensors;
  for (const auto& item : model.named_parameters()) {
    tensors.emplace(item.key(), item.value());
  }
  for (const auto& item : model.named_buffers()) {
    tensors.emplace(item.key(), item.value());
  }
  for (const ResolvedParameter& parameter : plan_.parameters) {
    const auto found = tensors.find(parameter.name);
    HS_CHECK(
        found != tensors.end(),
        "plan: the model to validate has no parameter '",
        parameter.name,
        "', which the plan was applied to",
        HS_HINT("validate the model that the plan was applied to")
    );
    const std::size_t dot = parameter.name.rfind('.');
    const std::string owner = dot == std::string::npos ? "" : parameter.name.substr(0, dot);
    parameters_of_[module_text(owner)].push_back(parameters_.size());
    parameters_.emplace_back(&parameter, found->second);
    tracker_.set_spec(found->second, parameter.spec, parameter.name);
  }
  give_gradients_layouts();
  compare_parameters();
  meet("start of validation");
}

// An engine's parameters can be read only while their unit is whole.
void Validator::compare_parameters() {
  for (const auto& [parameter, tensor] : parameters_) {
    if (!options_.has_engine) {
      compare_parameter(*parameter, tensor);
    }
  }
}

void Validator::compare_parameters_of(const std::string& path) {
  const auto found = parameters_of_.find(path);
  if (!options_.has_engine || found == parameters_of_.end()) {
    return;
  }
  for (const std::size_t index : found->second) {
    compare_parameter(*parameters_[index].first, parameters_[index].second);
  }
}

void Validator::compare_parameter(const ResolvedParameter& parameter, const at::Tensor& tensor) {
  compare(
      tensor,
      parameter.spec.layout,
      concat_text(parameter.is_buffer ? "buffer " : "parameter ", parameter.name),
      "give it the same initial values on all ranks (the same seed), and let every rank's "
      "optimizer make the same step",
      /*include_data_axes=*/!parameter.is_buffer  // running statistics are of the rank's data
  );
}

void Validator::set_layout(
    const at::Tensor& tensor, const Layout& layout, const std::string& name
) {
  meet("the layout of " + name);  // so that the exchange of sizes meets no other one
  const TrackingPause pause;
  const auto shape = global_shape(tensor.sizes(), layout, *applied_.mesh(), *everyone_);
  tracker_.set_spec(tensor, {shape, layout}, name);
  compare(tensor, layout, name, "give these ranks the same data");
}

void Validator::finish() {
  meet("end of validation");
}

bool Validator::tell_failure(ErrorCode code, const std::string& text) noexcept {
  const TrackingPause pause;
  return agreement_.tell_failure(code, text);
}

ValidationCounts Validator::counts() const {
  ValidationCounts counts = counts_;
  counts.meetings = agreement_.num_meetings();
  counts.values = agreement_.num_values();
  counts.table_size = tracker_.table_size();
  counts.pending = agreement_.num_pending();
  return counts;
}

void Validator::on_fault(const LayoutFault& fault) {
  agreement_.fail(fault);
}

void Validator::meet(const std::string& place) {
  const TrackingPause pause;
  const std::string stray = collectives_.unannounced();
  if (!stray.empty() && !options_.allow_own_collectives) {
    agreement_.fail(
        {.module = tracker_.module(),
         .subject = "before " + place,
         .operands = {},
         .what = "a collective ran that the plan does not know: " + stray,
         .fix = "let the plan's boundaries communicate and remove it (a second reduction makes "
                "values too large), or make it part of an operator with a rule of its own"}
    );
  }
  for (std::string& collective : collectives_.order()) {
    agreement_.add_event({.name = std::move(collective), .module = tracker_.module()});
  }
  agreement_.add_event({.name = place, .module = tracker_.module()});
  agreement_.meet();
  collectives_.settle();
}

void Validator::compare(
    const at::Tensor& tensor,
    const Layout& layout,
    std::string what,
    std::string fix,
    bool include_data_axes
) {
  if (!tensor.defined() || tensor.is_meta()) {
    return;
  }
  AgreedValue value{.what = std::move(what), .module = tracker_.module(), .fix = std::move(fix)};
  bool any = false;
  for (std::size_t axis = 0; axis < layout.placements.size(); ++axis) {
    const bool is_equal = layout.placements[axis].kind == Placement::Kind::kReplicate &&
                          mesh_.axes()[axis].size > 1 && (include_data_axes || !is_data_axis(axis));
    value.axes.push_back(is_equal ? Along::kEqual : Along::kFree);
    any = any || is_equal;
  }
  if (any) {
    const TrackingPause pause;
    value.hash = fingerprint(tensor);
    agreement_.add_value(std::move(value));
  }
}

void Validator::before_operator(const SeenOperator& seen) {
  ++counts_.operators;
  agreement_.add_event(
      {.name = seen.name,
       .module = tracker_.module(),
       .specs = seen.specs.vec(),
       .dtypes = dtypes(seen.operands)}
  );
  if (seen.verdict.is_random && options_.check_random) {
    check_random(seen);
  }
}

void Validator::check_random(const SeenOperator& seen) {
  auto generator = generator_of(seen);
  if (!generator.has_value() || seen.verdict.outputs.empty()) {
    return;
  }
  const TrackingPause pause;
  AgreedValue value{
      .what = "the random state of " + seen.name,
      .module = tracker_.module(),
      .fix =
          "seed the generator alike on ranks along axes on which the tensor is Replicate, and "
          "differently along axes on which it is cut"
  };
  for (const Placement& placement : seen.verdict.outputs.front().layout.placements) {
    value.axes.push_back(
        placement.kind == Placement::Kind::kReplicate ? Along::kEqual
        : placement.kind == Placement::Kind::kShard   ? Along::kDiffer
                                                      : Along::kFree
    );
  }
  {
    const std::lock_guard<std::mutex> lock(generator->mutex());
    value.hash = fingerprint(generator->get_state());
  }
  agreement_.add_value(std::move(value));
}

void Validator::after_operator(const SeenOperator& seen, c10::ArrayRef<at::Tensor> results) {
  // An operator with a rule may communicate inside.
  collectives_.settle();
  if (options_.level != ValidationLevel::kOperators) {
    return;
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (tracker_.is_unwritten(results[i])) {
      continue;
    }
    compare(
        results[i],
        seen.verdict.outputs[i].layout,
        result_name(i, seen.name),
        "its operands were alike: the operator itself depends on the rank or draws random numbers"
    );
  }
  meet(seen.name);
}

void Validator::before_backward_operator(
    const std::string& name,
    c10::ArrayRef<at::Tensor> operands,
    const std::string& origin,
    bool is_comparable
) {
  ++counts_.backward_operators;
  const int task = torch::autograd::get_current_graph_task_id();
  if (graph_task_ == -1) {
    graph_task_ = task;
    torch::autograd::Engine::get_default_engine().queue_callback([this] { end_backward(); });
  }
  if (is_comparable) {
    agreement_.add_event(
        {.name = name + " (backward)", .module = origin, .specs = {}, .dtypes = dtypes(operands)}
    );
  }
}

void Validator::on_assumed(const at::Tensor& tensor, const std::string& used_by) {
  compare(
      tensor,
      layout::replicated_layout(mesh_),
      concat_text(
          "a ", tensor.toString(), " of shape ", tensor.sizes(), " from outside, read by ", used_by
      ),
      "nobody said how it lies, so it counts as Replicate: say it with "
      "ValidationGuard::set_layout, or pass it as an argument of the model"
  );
}

void Validator::enter_module(const std::string& path, c10::ArrayRef<at::Tensor> inputs) {
  if (in_backward()) {
    return;
  }
  if (tracker_.module_depth() == 1) {
    begin_root(inputs);
  }
  compare_parameters_of(path);
  check_identities(path, RuleKind::kInput, inputs);
}

void Validator::leave_module(const std::string& path, c10::ArrayRef<at::Tensor> outputs) {
  if (in_backward()) {
    return;
  }
  check_identities(path, RuleKind::kOutput, outputs);
  if (options_.level != ValidationLevel::kBoundaries) {
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const auto spec = tracker_.spec_of(outputs[i]);
      if (spec.has_value()) {
        compare(outputs[i], spec->layout, result_name(i, path), kReplicateFix);
      }
    }
    meet("results of " + path);
  }
  if (tracker_.module_depth() == 1) {
    end_root(outputs);
  }
}

void Validator::begin_root(c10::ArrayRef<at::Tensor> inputs) {
  if (!in_root_) {
    in_root_ = true;
    ++counts_.forwards;
    tracker_.begin_forward();
    crossings_.clear();
    outputs_.clear();
    compare_parameters();
  }
  for (std::size_t i = 0; i < inputs.size() && i < plan_.inputs.size(); ++i) {
    // What a data pipeline computed inside the guard is a guess, which the plan's word replaces.
    if (inputs[i].defined() && tracker_.is_assumed(inputs[i]) && plan_.inputs[i].has_value()) {
      set_layout(inputs[i], *plan_.inputs[i], concat_text("input ", i, " of the model"));
    }
  }
}

bool Validator::is_data_axis(std::size_t axis) const {
  return plan_.is_data_axis(mesh_.axes()[axis].name);
}

}  // namespace hypershard::plan::internal
