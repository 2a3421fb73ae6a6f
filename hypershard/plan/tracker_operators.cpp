// The operator half of LayoutTracker: what happens around each call.
#include <algorithm>
#include <string>
#include <utility>

#include <ATen/SequenceNumber.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <torch/csrc/autograd/graph_task.h>

#include "hypershard/core/error.h"
#include "hypershard/layout/sharding.h"
#include "hypershard/plan/internal/tensor_facts.h"
#include "hypershard/plan/tracker.h"

namespace hypershard::plan {

namespace {

// Nodes of a backward that are older than this many operators lose their module.
constexpr std::size_t kKeptOrigins = std::size_t{1} << 16;

// Tells whether some rank holds nothing of a tensor of which others hold something.
bool has_empty_piece(const layout::TensorSpec& spec, const layout::DeviceMesh& mesh) {
  for (std::size_t dim = 0; dim < spec.shape.size(); ++dim) {
    std::int64_t pieces = 1;
    for (std::size_t axis = 0; axis < spec.layout.placements.size(); ++axis) {
      pieces *= spec.layout.placements[axis] == layout::Placement::shard(static_cast<int>(dim))
                    ? mesh.axes()[axis].size
                    : 1;
    }
    if (spec.shape[dim] < pieces && spec.shape[dim] > 0) {
      return true;
    }
  }
  return false;
}

bool is_cut(const layout::TensorSpec& spec, const layout::DeviceMesh& mesh) {
  for (std::size_t axis = 0; axis < spec.layout.placements.size(); ++axis) {
    if (spec.layout.placements[axis].splits() && mesh.axes()[axis].size > 1) {
      return true;
    }
  }
  return false;
}

template <class F>
void visit_value(const c10::IValue& value, const F& f) {
  if (value.isTensor()) {
    f(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      f(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      f(tensor.value_or(at::Tensor()));
    }
  }
}

std::string name_of(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

// Numbers, flags and sizes that the program reads: no layout comes of them. Where they steer the
// program differently on two ranks, the order of operators shows it.
bool returns_tensors(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const auto& result) {
    const auto& type = *result.type();
    return type.isSubtypeOf(*c10::TensorType::get()) ||
           type.isSubtypeOf(*c10::ListType::ofTensors()) ||
           type.kind() == c10::TypeKind::OptionalType;
  });
}

bool makes_fresh_memory(const std::string& name) {
  return name.starts_with("aten::empty") || name.starts_with("aten::new_empty");
}

// Without grad mode (in the body of a custom function, in a recomputed segment) detaching says
// nothing: what comes out of there learns later whether it takes a gradient.
bool cuts_gradient(const std::string& name) {
  return name.starts_with("aten::detach") && at::GradMode::is_enabled();
}

std::vector<at::Tensor> results_on(
    const c10::OperatorHandle& op, const std::vector<c10::IValue>& stack
) {
  std::vector<at::Tensor> results;
  const std::size_t count = op.schema().returns().size();
  for (std::size_t i = stack.size() - count; i < stack.size(); ++i) {
    visit_value(stack[i], [&results](const at::Tensor& tensor) { results.push_back(tensor); });
  }
  return results;
}

}  // namespace

struct LayoutTracker::Call {
  const c10::OperatorHandle& op;
  std::string name;
  c10::ArrayRef<c10::IValue> arguments;
  std::vector<at::Tensor> operands = {};
  std::vector<layout::TensorSpec> specs = {};
  std::vector<int> values = {};
  std::vector<int> assumed = {};  ///< operands of which nobody said how they lie
  dtensor::Verdict verdict = {};

  SeenOperator seen() const { return {op, name, arguments, operands, specs, verdict}; }
};

void LayoutTracker::run(const c10::OperatorHandle& op, std::vector<c10::IValue>* stack) {
  if (torch::autograd::get_current_graph_task_id() != -1) {
    run_backward(op, stack);
  } else if ((stack_.empty() && !at::GradMode::is_enabled()) ||
             (!returns_tensors(op.schema()) && !op.schema().is_mutable())) {
    op.callBoxed(stack);
  } else {
    run_forward(op, stack);
  }
}

void LayoutTracker::run_backward(const c10::OperatorHandle& op, std::vector<c10::IValue>* stack) {
  const std::size_t count = op.schema().arguments().size();
  std::vector<at::Tensor> operands;
  for (std::size_t i = stack->size() - count; i < stack->size(); ++i) {
    visit_value((*stack)[i], [&operands](const at::Tensor& tensor) {
      if (tensor.defined()) {
        operands.push_back(tensor);
      }
    });
  }
  // A recomputed segment has its modules' names, a backward those of the forward.
  const OriginMark origin =
      stack_.empty() ? backward_origin() : OriginMark{.module = current_module()};
  observer_.before_backward_operator(
      name_of(op), operands, module_path(origin.module), origin.is_comparable
  );
  op.callBoxed(stack);
}

void LayoutTracker::add_origin(bool is_comparable) {
  origins_.push_back({at::sequence_number::peek(), current_module(), is_comparable});
  if (origins_.size() > kKeptOrigins) {
    origins_.pop_front();
  }
}

bool LayoutTracker::has_empty_pieces(const Call& call) const {
  const auto is_empty = [this](const layout::TensorSpec& spec) {
    return has_empty_piece(spec, mesh_);
  };
  return std::any_of(call.specs.begin(), call.specs.end(), is_empty) ||
         std::any_of(call.verdict.outputs.begin(), call.verdict.outputs.end(), is_empty);
}

void LayoutTracker::run_forward(const c10::OperatorHandle& op, std::vector<c10::IValue>* stack) {
  const std::size_t count = op.schema().arguments().size();
  Call call{
      op, name_of(op), c10::ArrayRef<c10::IValue>(stack->data() + stack->size() - count, count)
  };
  gather_operands(call);
  check_written(call);
  call.verdict = dtensor::propagate({op, call.arguments, call.specs}, mesh_);
  const bool is_refused = call.verdict.refusal.has_value();
  if (is_refused) {
    observer_.on_fault(fault_of(call, call.verdict.refusal->what, call.verdict.refusal->fix));
  }
  observer_.before_operator(call.seen());
  op.callBoxed(stack);
  const bool has_empty = has_empty_pieces(call);
  has_empty_pieces_ = has_empty_pieces_ || has_empty;
  add_origin(!has_empty);
  call.arguments = {};  // consumed
  const std::vector<at::Tensor> results = results_on(op, *stack);
  if (!is_refused) {
    check_results(call, results);
  }
  record_results(call, results, is_refused);
  observer_.after_operator(call.seen(), results);
}

void LayoutTracker::gather_operands(Call& call) {
  for (const c10::IValue& argument : call.arguments) {
    visit_value(argument, [&call](const at::Tensor& tensor) {
      if (tensor.defined()) {
        call.operands.push_back(tensor);
      }
    });
  }
  for (const at::Tensor& tensor : call.operands) {
    const TableEntry& entry = entry_of(tensor, call.name);
    if (entry.is_assumed) {
      call.assumed.push_back(static_cast<int>(call.specs.size()));
    }
    call.specs.push_back(entry.spec);
    call.values.push_back(entry.value);
  }
}

// See NOTE [unseen kernels]: reading such memory would continue with a layout that is made up.
void LayoutTracker::check_written(const Call& call) {
  const auto& schema = call.op.schema().arguments();
  for (std::size_t i = 0; i < call.arguments.size(); ++i) {
    if (schema[i].alias_info() != nullptr) {
      continue;  // written, or only looked at through a view
    }
    visit_value(call.arguments[i], [&](const at::Tensor& tensor) {
      const TableEntry* entry = tensor.defined() ? table_.find(tensor) : nullptr;
      if (entry != nullptr && entry->is_unwritten && tensor.numel() > 0) {
        observer_.on_fault(fault_of(
            call,
            concat_text(
                "argument '",
                schema[i].name(),
                "' is memory that no operator wrote to: a kernel that is no operator filled it, "
                "and "
                "nobody knows how its values lie"
            ),
            "make the kernel an operator (TORCH_LIBRARY) with a layout rule (register_op_rule)"
        ));
      }
    });
  }
}

void LayoutTracker::check_results(const Call& call, c10::ArrayRef<at::Tensor> results) {
  HS_ASSERT(
      call.verdict.outputs.size() == results.size(),
      "plan: the rule of ",
      call.name,
      " speaks of ",
      call.verdict.outputs.size(),
      " results, the operator returned ",
      results.size()
  );
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (!results[i].defined()) {
      continue;
    }
    const auto expected = layout::local_shape(call.verdict.outputs[i], mesh_, rank_);
    if (results[i].sizes() != at::IntArrayRef(expected)) {
      observer_.on_fault(fault_of(
          call,
          concat_text(
              "result ",
              i,
              " has shape ",
              results[i].sizes().vec(),
              ", but as ",
              operand_text(call.verdict.outputs[i], expected, mesh_),
              " it should have ",
              expected
          ),
          "the operator does not compute its part of the whole: compute sizes from the local "
          "tensor (or write -1), not from the model's global sizes"
      ));
    }
  }
}

std::vector<layout::TensorSpec> LayoutTracker::guess(
    const Call& call, c10::ArrayRef<at::Tensor> results
) const {
  std::vector<layout::TensorSpec> specs;
  for (const at::Tensor& result : results) {
    layout::TensorSpec spec{{}, layout::replicated_layout(mesh_)};
    if (result.defined()) {
      spec.shape = result.sizes().vec();
      for (std::size_t i = 0; i < call.operands.size(); ++i) {
        if (call.operands[i].sizes() == result.sizes()) {
          spec = call.specs[i];
          break;
        }
      }
    }
    specs.push_back(std::move(spec));
  }
  return specs;
}

bool LayoutTracker::is_view_of_unwritten(const Call& call, const at::Tensor& result) {
  if (call.op.schema().is_mutable()) {
    return false;
  }
  return std::any_of(call.operands.begin(), call.operands.end(), [&](const at::Tensor& operand) {
    const TableEntry* entry = table_.find(operand);
    return entry != nullptr && entry->is_unwritten && operand.is_alias_of(result);
  });
}

void LayoutTracker::record_results(Call& call, c10::ArrayRef<at::Tensor> results, bool is_refused) {
  if (is_refused) {
    call.verdict.outputs = guess(call, results);
  }
  const bool flows = !cuts_gradient(call.name) &&
                     std::any_of(call.values.begin(), call.values.end(), [this](int value) {
                       return tape_.value(value).differentiable;
                     });
  std::vector<TapeValue> outputs;
  for (std::size_t i = 0; i < results.size(); ++i) {
    const bool differentiable =
        flows && results[i].defined() && internal::can_have_gradient(results[i]);
    outputs.push_back({call.verdict.outputs[i], -1, differentiable, {}});
  }
  TapeOperator op{.name = call.name, .module = current_module(), .operands = call.values};
  const int index = tape_.add_operator(std::move(op), std::move(outputs));
  const bool is_fresh = makes_fresh_memory(call.name);
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (!results[i].defined()) {
      continue;
    }
    const int value = tape_.op(index).outputs[i];
    const std::int64_t version = internal::version_of(results[i]);
    TableEntry entry{.spec = call.verdict.outputs[i], .version = version};
    entry.epoch = epoch_;
    entry.value = value;
    entry.is_unwritten = is_fresh || is_view_of_unwritten(call, results[i]);
    entry.is_assumed = call.assumed.size() == call.operands.size();
    table_.set(results[i], std::move(entry));
    if (call.op.schema().is_mutable()) {
      last_write_[internal::storage_of(results[i])] = {value, version};
    }
  }
}

LayoutFault LayoutTracker::fault_of(const Call& call, std::string what, std::string fix) const {
  LayoutFault fault{
      .module = module(),
      .subject = call.name,
      .operands = {},
      .what = std::move(what),
      .fix = std::move(fix)
  };
  for (std::size_t i = 0; i < call.operands.size(); ++i) {
    fault.operands.push_back(operand_text(call.specs[i], call.operands[i].sizes().vec(), mesh_));
  }
  const bool has_cut = std::any_of(call.specs.begin(), call.specs.end(), [this](const auto& spec) {
    return is_cut(spec, mesh_);
  });
  for (const int operand : call.assumed) {
    if (has_cut && call.operands[static_cast<std::size_t>(operand)].numel() > 1) {
      fault.fix += concat_text(
          "; nobody said how tensor ",
          operand,
          " lies, so it counts as whole: name it (a PlannedInput when resolving, "
          "ValidationGuard::set_layout when validating), or make it from a tensor that has a layout"
      );
    }
  }
  return fault;
}

}  // namespace hypershard::plan
