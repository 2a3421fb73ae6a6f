// The re-entrant autograd function behind recompute().
// First forward: grad mode off, inputs saved through autograd's saved variables (so that version
// checks and storage swaps work). Backward: second forward on detached inputs, then a nested run of
// the engine over its graph.
#include "hypershard/nn/recompute.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "hypershard/core/error.h"
#include "hypershard/nn/internal/ambient_state.h"

namespace hypershard::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

thread_local RecomputeSegment* current_segment = nullptr;
thread_local int second_forward_depth = 0;
thread_local std::int64_t num_segments = 0;

/// Sets the thread's segment for a scope.
class SegmentScope {
 public:
  explicit SegmentScope(RecomputeSegment* segment)
      : outer_(std::exchange(current_segment, segment)) {}
  SegmentScope(const SegmentScope&) = delete;
  SegmentScope& operator=(const SegmentScope&) = delete;
  ~SegmentScope() { current_segment = outer_; }

 private:
  RecomputeSegment* outer_;
};

/// Marks the second forward; the segments around it are not in their first one.
class SecondForwardScope {
 public:
  SecondForwardScope() : no_segment_(nullptr) { ++second_forward_depth; }
  SecondForwardScope(const SecondForwardScope&) = delete;
  SecondForwardScope& operator=(const SecondForwardScope&) = delete;
  ~SecondForwardScope() { --second_forward_depth; }

 private:
  SegmentScope no_segment_;
};

/// What the second run's outputs must look like.
struct OutputForm {
  std::vector<std::int64_t> sizes;
  at::ScalarType dtype = at::kFloat;
  bool defined = false;

  explicit OutputForm(const at::Tensor& output) : defined(output.defined()) {
    if (defined) {
      sizes = output.sizes().vec();
      dtype = output.scalar_type();
    }
  }
  bool operator==(const OutputForm&) const = default;
};

std::string to_text(const OutputForm& form) {
  return form.defined ? concat_text(at::toString(form.dtype), form.sizes) : "undefined";
}

struct Segment : public RecomputeSegment, public torch::CustomClassHolder {
  void add_observer(std::shared_ptr<RecomputeObserver> observer) override {
    if (std::find(observers.begin(), observers.end(), observer) == observers.end()) {
      observers.push_back(std::move(observer));
    }
  }

  TensorsFn fn;
  std::vector<bool> input_is_defined;
  std::vector<bool> output_is_defined;
  internal::AmbientState ambient;
  std::vector<OutputForm> output_forms;
  std::vector<std::shared_ptr<RecomputeObserver>> observers;
};

/// Brackets a segment's second life for its observers.
class ObservedLife {
 public:
  explicit ObservedLife(const Segment& segment) : observers_(segment.observers) {
    try {
      for (const auto& observer : observers_) {
        observer->before_recompute();
        ++begun_;
      }
    } catch (...) {
      end();
      throw;
    }
  }
  ObservedLife(const ObservedLife&) = delete;
  ObservedLife& operator=(const ObservedLife&) = delete;
  ~ObservedLife() { end(); }

 private:
  void end() noexcept {
    while (begun_ > 0) {
      observers_[--begun_]->after_recompute();
    }
  }

  std::vector<std::shared_ptr<RecomputeObserver>> observers_;
  std::size_t begun_ = 0;
};

std::vector<std::int64_t> versions_of(const std::vector<at::Tensor>& tensors) {
  std::vector<std::int64_t> versions;
  for (const auto& tensor : tensors) {
    versions.push_back(tensor.defined() && !tensor.is_inference() ? tensor._version() : 0);
  }
  return versions;
}

std::vector<at::Tensor> run_first(Segment& segment, const std::vector<at::Tensor>& inputs) {
  segment.ambient = internal::AmbientState::capture(inputs);
  const auto versions = versions_of(inputs);
  std::vector<at::Tensor> outputs;
  {
    const SegmentScope scope(&segment);
    outputs = segment.fn(inputs);
  }
  const auto versions_after = versions_of(inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    HS_CHECK(
        versions[i] == versions_after[i],
        "nn.recompute: the segment changes its input ",
        i,
        " in place, so it can not be run again from it",
        HS_HINT("let the segment work on a copy: input.clone()")
    );
  }
  for (const auto& output : outputs) {
    segment.output_forms.emplace_back(output);
  }
  return outputs;
}

void check_outputs(const Segment& segment, const std::vector<at::Tensor>& outputs) {
  constexpr const char* kHint =
      "the segment's function must compute the same each time: no state that its first run changes";
  HS_CHECK(
      outputs.size() == segment.output_forms.size(),
      "nn.recompute: the second run gave another number of outputs: ",
      outputs.size(),
      " (expected ",
      segment.output_forms.size(),
      ", as in the first)",
      HS_HINT(kHint)
  );
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const OutputForm form(outputs[i]);
    HS_CHECK(
        form == segment.output_forms[i],
        "nn.recompute: the second run gave another output ",
        i,
        ": ",
        form,
        " (expected ",
        segment.output_forms[i],
        ", as in the first)",
        HS_HINT(kHint)
    );
  }
}

/// Cuts the inputs off the outer graph; the copies collect the gradients.
std::vector<at::Tensor> detach_inputs(const variable_list& saved) {
  std::vector<at::Tensor> inputs;
  for (const auto& tensor : saved) {
    inputs.push_back(tensor.detach().set_requires_grad(tensor.requires_grad()));
  }
  return inputs;
}

// Autograd takes and gives defined tensors only: undefined ones are left out on the way in and out
// of the autograd function and put back in their places on the other side.

std::vector<at::Tensor> only_defined(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> defined;
  std::copy_if(tensors.begin(), tensors.end(), std::back_inserter(defined), [](const auto& tensor) {
    return tensor.defined();
  });
  return defined;
}

std::vector<at::Tensor> with_undefined(
    at::TensorList defined, const std::vector<bool>& is_defined
) {
  std::vector<at::Tensor> tensors(is_defined.size());
  std::size_t next = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (is_defined[i]) {
      tensors[i] = defined[next++];
    }
  }
  return tensors;
}

std::vector<bool> definedness(const std::vector<at::Tensor>& tensors) {
  std::vector<bool> is_defined;
  for (const auto& tensor : tensors) {
    is_defined.push_back(tensor.defined());
  }
  return is_defined;
}

std::vector<at::Tensor> run_second(const Segment& segment, const std::vector<at::Tensor>& inputs) {
  const SecondForwardScope scope;
  const internal::AmbientStateGuard ambient(segment.ambient, inputs);
  const at::AutoGradMode grad_mode(true);
  auto outputs = segment.fn(inputs);
  check_outputs(segment, outputs);
  return outputs;
}

/// Runs the nested backward of what the second forward built.
void run_backward(std::vector<at::Tensor> outputs, variable_list grads) {
  torch::autograd::edge_list roots;
  variable_list root_grads;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (grads[i].defined() && outputs[i].defined() && outputs[i].requires_grad()) {
      roots.push_back(torch::autograd::impl::gradient_edge(outputs[i]));
      root_grads.push_back(std::move(grads[i]));
    }
  }
  outputs.clear();
  grads.clear();
  if (!roots.empty()) {
    torch::autograd::Engine::get_default_engine().execute(
        roots, root_grads, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/true
    );
  }
}

void check_supported() {
  HS_SUPPORTED(
      !at::GradMode::is_enabled(),
      "nn.recompute: backward with create_graph=true can not run through a recomputed segment",
      HS_HINT("call the function without recompute() for second derivatives")
  );
  const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
  HS_SUPPORTED(
      exec_info == nullptr || exec_info->empty(),
      "nn.recompute: autograd::grad(), or backward() with `inputs`, can not run through a "
      "recomputed segment: the gradients of "
      "the parameters inside would be accumulated",
      HS_HINT("call backward() on the loss, or call the function without recompute()")
  );
}

constexpr const char* kSegment = "segment";

struct RecomputeFunction : torch::autograd::Function<RecomputeFunction> {
  // `carrier` requires a gradient where no input does.
  static variable_list forward(
      AutogradContext* ctx,
      const c10::intrusive_ptr<Segment>& segment,
      at::TensorList inputs,
      const at::Tensor& /*carrier*/
  ) {
    ctx->set_materialize_grads(false);
    ctx->saved_data[kSegment] = c10::IValue::make_capsule(segment);
    ctx->save_for_backward(inputs.vec());
    const auto outputs = run_first(*segment, with_undefined(inputs, segment->input_is_defined));
    segment->output_is_defined = definedness(outputs);
    return only_defined(outputs);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    check_supported();
    const auto saved = ctx->get_saved_variables();
    variable_list input_grads(saved.size() + 2);  // the segment and the carrier get none
    if (std::none_of(grads.begin(), grads.end(), [](const auto& grad) { return grad.defined(); })) {
      return input_grads;
    }
    const auto segment =
        c10::static_intrusive_pointer_cast<Segment>(ctx->saved_data.at(kSegment).toCapsule());
    const ObservedLife life(*segment);
    const auto inputs = detach_inputs(saved);
    run_backward(
        run_second(*segment, with_undefined(inputs, segment->input_is_defined)),
        with_undefined(grads, segment->output_is_defined)
    );
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      input_grads[i + 1] = inputs[i].grad();
    }
    return input_grads;
  }
};

at::Tensor make_carrier(const std::vector<at::Tensor>& inputs) {
  const bool needed = std::none_of(inputs.begin(), inputs.end(), [](const auto& input) {
    return input.defined() && input.requires_grad();
  });
  at::Tensor carrier = at::empty({0});
  carrier.set_requires_grad(needed);
  return carrier;
}

}  // namespace

std::int64_t num_recompute_segments() {
  return num_segments;
}

RecomputeSegment* current_recompute_segment() {
  return current_segment;
}

bool in_second_forward() {
  return second_forward_depth > 0;
}

std::vector<at::Tensor> recompute(TensorsFn fn, const std::vector<at::Tensor>& inputs) {
  if (!at::GradMode::is_enabled()) {
    return fn(inputs);
  }
  ++num_segments;
  auto segment = c10::make_intrusive<Segment>();
  segment->fn = std::move(fn);
  segment->input_is_defined = definedness(inputs);
  const auto defined = only_defined(inputs);
  const auto outputs =
      RecomputeFunction::apply(segment, at::TensorList(defined), make_carrier(inputs));
  return with_undefined(outputs, segment->output_is_defined);
}

at::Tensor recompute(std::function<at::Tensor(const at::Tensor&)> fn, const at::Tensor& input) {
  const auto one = [fn = std::move(fn)](const std::vector<at::Tensor>& inputs) {
    return std::vector<at::Tensor>{fn(inputs[0])};
  };
  return recompute(TensorsFn(one), std::vector<at::Tensor>{input})[0];
}

}  // namespace hypershard::nn
