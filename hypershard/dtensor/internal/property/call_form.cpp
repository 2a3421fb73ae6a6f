// Fits arguments to an operator's schema.
#include "hypershard/dtensor/internal/property/call_form.h"

#include <algorithm>

#include <ATen/core/dispatch/Dispatcher.h>

#include "hypershard/core/error.h"

namespace hypershard::dtensor::property {
namespace {

/// Lists the defined tensors of a stack, in order.
Tensors tensors_of(const Stack& stack) {
  Tensors all;
  for (const c10::IValue& value : stack) {
    if (value.isTensor() && value.toTensor().defined()) {
      all.push_back(value.toTensor());
    } else if (value.isList()) {
      for (const c10::IValue& entry : value.toListRef()) {
        if (entry.isTensor() && entry.toTensor().defined()) {
          all.push_back(entry.toTensor());
        }
      }
    }
  }
  return all;
}

/// Lists of optional tensors come as lists of tensors, undefined ones for none.
c10::IValue fitted(const c10::IValue& value, const c10::Argument& schema) {
  if (value.isTensorList() && schema.type()->str() == "Tensor?[]") {
    c10::List<std::optional<at::Tensor>> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt);
    }
    return list;
  }
  return value;
}

c10::IValue replaced_optionals(
    const c10::IValue& value, const Tensors& tensors, std::size_t& next
) {
  const auto entries = value.toListRef();
  const bool has_tensors = std::any_of(entries.begin(), entries.end(), [](const c10::IValue& v) {
    return v.isTensor();
  });
  if (!has_tensors) {
    return value;
  }
  c10::List<std::optional<at::Tensor>> list;
  for (const c10::IValue& entry : entries) {
    list.push_back(entry.isTensor() ? std::optional<at::Tensor>(tensors[next++]) : std::nullopt);
  }
  return list;
}

}  // namespace

CallForm::CallForm(const c10::OperatorHandle& op, const Arguments& arguments) {
  const auto& schema = op.schema().arguments();
  std::vector<bool> given(schema.size());
  values_.resize(schema.size());
  makers_.resize(schema.size());
  std::size_t next = 0;
  for (const Argument& argument : arguments) {
    std::size_t slot = argument.name.empty() ? next++ : 0;
    while (!argument.name.empty() && schema[slot].name() != argument.name) {
      HS_CHECK_LT(slot + 1, schema.size(), "no argument ", argument.name);
      ++slot;
    }
    HS_CHECK_LT(slot, schema.size(), "too many arguments");
    given[slot] = true;
    values_[slot] = fitted(argument.value, schema[slot]);
    makers_[slot] = argument.from_tensors;
  }
  for (std::size_t i = 0; i < schema.size(); ++i) {
    if (!given[i] && schema[i].default_value().has_value()) {
      values_[i] = *schema[i].default_value();
    }
  }
  whole_ = tensors_of(values_);
}

Stack CallForm::with(const Tensors& tensors, const Offsets& offsets) const {
  Stack stack = values_;
  std::size_t next = 0;
  for (std::size_t i = 0; i < stack.size(); ++i) {
    if (stack[i].isTensor() && stack[i].toTensor().defined()) {
      stack[i] = tensors[next++];
    } else if (stack[i].isTensorList()) {
      Tensors list;
      for (std::size_t n = stack[i].toListRef().size(); n > 0; --n) {
        list.push_back(tensors[next++]);
      }
      stack[i] = c10::IValue(list);
    } else if (stack[i].isList()) {
      stack[i] = replaced_optionals(stack[i], tensors, next);
    }
  }
  for (std::size_t i = 0; i < stack.size(); ++i) {
    if (makers_[i]) {
      stack[i] = makers_[i](tensors, offsets);
    }
  }
  return stack;
}

}  // namespace hypershard::dtensor::property
