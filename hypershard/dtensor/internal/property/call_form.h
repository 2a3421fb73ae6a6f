// A call of an operator with its tensors left open: filled with whole tensors or a rank's own.
#pragma once

#include <functional>
#include <vector>

#include <ATen/core/ivalue.h>

#include "hypershard/dtensor/internal/property/rule_case.h"

namespace c10 {
class OperatorHandle;
}

namespace hypershard::dtensor::property {

using Stack = std::vector<c10::IValue>;

/// A call without its sizes: they are made from each rank's tensors.
class CallForm {
 public:
  CallForm(const c10::OperatorHandle& op, const Arguments& arguments);

  /// Lists the defined tensors of the arguments, in order.
  const Tensors& whole() const { return whole_; }

  /// Puts `tensors`, which begin at `offsets`, in place of the whole ones, and what is made from
  /// them.
  Stack with(const Tensors& tensors, const Offsets& offsets) const;

 private:
  std::vector<c10::IValue> values_;
  std::vector<std::function<c10::IValue(const Tensors&, const Offsets&)>> makers_;
  Tensors whole_;
};

}  // namespace hypershard::dtensor::property
