// The bookkeeping half of LayoutTracker: table, tape and module path. Operators are in
// tracker_operators.cpp.
#include "hypershard/plan/tracker.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/node.h>

#include "hypershard/core/error.h"
#include "hypershard/layout/sharding.h"
#include "hypershard/plan/internal/tensor_facts.h"

namespace hypershard::plan {

void TrackerObserver::on_fault(const LayoutFault& fault) {
  throw LayoutError(fault);  // raw-throw: carries the fault's fields
}

LayoutTracker::LayoutTracker(const layout::DeviceMesh& mesh, int rank, TrackerObserver& observer)
    : mesh_(mesh), rank_(rank), observer_(observer) {}

void LayoutTracker::set_spec(
    const at::Tensor& tensor, layout::TensorSpec spec, const std::string& name
) {
  layout::check_spec(spec, mesh_);
  const auto expected = layout::local_shape(spec, mesh_, rank_);
  if (tensor.sizes() != at::IntArrayRef(expected)) {
    observer_.on_fault(
        {.module = module(),
         .subject = name,
         .operands = {operand_text(spec, tensor.sizes().vec(), mesh_)},
         .what = concat_text(
             "the tensor has shape ",
             tensor.sizes().vec(),
             " on this rank, but its part of the global tensor is ",
             expected
         ),
         .fix = "give this rank its balanced cut, or correct the layout or the global shape"}
    );
  }
  TableEntry entry{.spec = std::move(spec), .name = name, .version = internal::version_of(tensor)};
  entry.epoch = epoch_;
  entry.value = tape_.add_given(
      entry.spec, internal::can_have_gradient(tensor) && tensor.requires_grad(), name
  );
  table_.set(tensor, std::move(entry));
}

std::optional<layout::TensorSpec> LayoutTracker::spec_of(const at::Tensor& tensor) {
  const TableEntry* entry = tensor.defined() ? table_.find(tensor) : nullptr;
  return entry == nullptr ? std::nullopt : std::optional(entry->spec);
}

bool LayoutTracker::is_assumed(const at::Tensor& tensor) {
  const TableEntry* entry = tensor.defined() ? table_.find(tensor) : nullptr;
  return entry == nullptr || entry->is_assumed;
}

layout::TensorSpec LayoutTracker::spec_or_assume(
    const at::Tensor& tensor, const std::string& used_by
) {
  return entry_of(tensor, used_by).spec;
}

bool LayoutTracker::is_unwritten(const at::Tensor& tensor) {
  const TableEntry* entry = tensor.defined() ? table_.find(tensor) : nullptr;
  return entry != nullptr && entry->is_unwritten;
}

TableEntry& LayoutTracker::entry_of(const at::Tensor& tensor, const std::string& used_by) {
  TableEntry* entry = table_.find(tensor);
  if (entry == nullptr) {
    TableEntry assumed{.spec = {tensor.sizes().vec(), layout::replicated_layout(mesh_)}};
    assumed.is_assumed = true;
    entry = &table_.set(tensor, std::move(assumed));
    if (!internal::is_wrapped_number(tensor)) {
      observer_.on_assumed(tensor, used_by);
    }
  }
  refresh_value(tensor, *entry);
  return *entry;
}

int LayoutTracker::value_of(const at::Tensor& tensor, const std::string& used_by) {
  return entry_of(tensor, used_by).value;
}

void LayoutTracker::refresh_value(const at::Tensor& tensor, TableEntry& entry) {
  const std::int64_t version = internal::version_of(tensor);
  if (entry.epoch != epoch_) {
    entry.epoch = epoch_;
    entry.version = version;
    entry.value = tape_.add_given(
        entry.spec, internal::can_have_gradient(tensor) && tensor.requires_grad(), entry.name
    );
    return;
  }
  if (entry.version != version) {
    entry.is_unwritten = false;
    // Written through another tensor that shares the memory.
    TapeOperator alias{.kind = TapeKind::kAlias, .name = "in-place write", .module = 0};
    alias.module = current_module();
    alias.operands = {entry.value};
    const auto write = last_write_.find(internal::storage_of(tensor));
    if (write != last_write_.end() && write->second.version == version) {
      alias.operands.push_back(write->second.value);
    }
    const bool differentiable =
        std::any_of(alias.operands.begin(), alias.operands.end(), [this](int operand) {
          return tape_.value(operand).differentiable;
        });
    const int op = tape_.add_operator(std::move(alias), {{entry.spec, -1, differentiable, {}}});
    entry.value = tape_.op(op).outputs.front();
    entry.version = version;
  }
  // Under a custom autograd function operators run without grad mode, and what they return learns
  // only afterwards that it takes a gradient: a tensor's own word counts outside only.
  if (at::GradMode::is_enabled() && !tensor.requires_grad()) {
    tape_.set_constant(entry.value);
  }
}

void LayoutTracker::begin_forward() {
  has_empty_pieces_ = false;
  tape_.clear();
  last_write_.clear();
  ++epoch_;
  table_.sweep();
}

void LayoutTracker::record_boundary(
    const at::Tensor& source, const at::Tensor& result, layout::TensorSpec spec, TapeOperator op
) {
  op.kind = TapeKind::kBoundary;
  op.module = current_module();
  op.operands = {value_of(source, op.name)};
  const bool differentiable = tape_.value(op.operands[0]).differentiable;
  const int index = tape_.add_operator(std::move(op), {{spec, -1, differentiable, {}}});
  TableEntry entry{.spec = std::move(spec), .version = internal::version_of(result)};
  entry.epoch = epoch_;
  entry.value = tape_.op(index).outputs.front();
  table_.set(result, std::move(entry));
  add_origin(/*is_comparable=*/false);
}

int LayoutTracker::module_index(const std::string& path) {
  const auto [known, is_new] = path_index_.try_emplace(path, static_cast<int>(paths_.size()));
  if (is_new) {
    paths_.push_back(path);
  }
  return known->second;
}

void LayoutTracker::enter_module(const std::string& path, c10::ArrayRef<at::Tensor> inputs) {
  stack_.push_back(module_index(path));
  failed_depth_ = 0;
  observer_.enter_module(module(), inputs);
}

void LayoutTracker::leave_module(c10::ArrayRef<at::Tensor> outputs) {
  observer_.leave_module(module(), outputs);
  stack_.pop_back();
}

void LayoutTracker::abandon_module() noexcept {
  if (!stack_.empty()) {
    if (failed_depth_ < stack_.size()) {
      failed_module_ = stack_.back();
    }
    failed_depth_ = stack_.size();
    stack_.pop_back();
  }
}

// An autograd node's module and kind, by the numbers of nodes.
LayoutTracker::OriginMark LayoutTracker::backward_origin() const {
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr || origins_.empty()) {
    return {};
  }
  // Numbers grow. An operator's nodes lie in [begin, end) of its mark; the node of a custom
  // function is made before the first operator of its body, hence before that one's end.
  const std::uint64_t sequence = node->sequence_nr();
  const auto mark = std::upper_bound(
      origins_.begin(),
      origins_.end(),
      sequence,
      [](std::uint64_t number, const OriginMark& each) { return number < each.end; }
  );
  if (mark != origins_.end()) {
    return *mark;
  }
  // Made in a recomputed segment (whose operators have no layouts), or sums a parameter's gradient.
  return {.is_comparable = !has_empty_pieces_};
}

}  // namespace hypershard::plan
