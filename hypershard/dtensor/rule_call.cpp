// Reads a boxed call through its schema, so that rules name arguments and never count them.
#include "hypershard/dtensor/rule_call.h"

#include <cmath>
#include <numeric>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include "hypershard/core/error.h"

namespace hypershard::dtensor {
namespace {

void check_kind(
    const RuleCall& call,
    std::string_view argument,
    const c10::IValue& value,
    bool is_right,
    std::string_view expected
) {
  HS_CHECK(
      is_right,
      "dtensor.rules: ",
      call.name(),
      ": argument '",
      argument,
      "' is a ",
      value.tagKind(),
      ", not ",
      expected
  );
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

int wrapped(std::int64_t dim, int rank, std::string_view op) {
  // A scalar takes -1 and 0, as torch has it.
  const std::int64_t extent = rank == 0 ? 1 : rank;
  HS_CHECK(
      dim >= -extent && dim < extent,
      "dtensor.rules: ",
      op,
      ": dimension ",
      dim,
      " of a tensor with ",
      rank,
      " dimensions"
  );
  return static_cast<int>(dim < 0 ? dim + extent : dim);
}

}  // namespace

RuleCall::RuleCall(const OpCall& call, const layout::DeviceMesh& mesh) : call_(call), mesh_(mesh) {
  const auto& arguments = call.op.schema().arguments();
  HS_CHECK_EQ(
      arguments.size(),
      call.arguments.size(),
      "dtensor.rules: ",
      name(),
      ": a call holds every argument of the schema"
  );
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    add_argument(arguments[i], i);
  }
  HS_CHECK_EQ(
      next_spec_,
      call.operands.size(),
      "dtensor.rules: ",
      name(),
      ": one spec for each defined tensor of the arguments"
  );
}

void RuleCall::add_argument(const c10::Argument& schema, std::size_t argument) {
  const c10::IValue& value = call_.arguments[argument];
  // `out` arguments are keyword-only and written; an in-place operator's self is an operand too.
  const bool is_out = is_written(schema) && schema.kwarg_only();
  const std::size_t first_spec = next_spec_;
  if (value.isTensor()) {
    add(value.toTensor(), argument, is_out ? std::string() : schema.name());
  } else if (value.isTensorList() || value.isList()) {
    int item = 0;
    for (const c10::IValue& entry : value.toListRef()) {
      if (entry.isTensor()) {
        const std::string name = schema.name() + "[" + std::to_string(item) + "]";
        add(entry.toTensor(), argument, is_out ? std::string() : name);
      }
      ++item;
    }
  }
  if (is_written(schema)) {
    for (std::size_t i = first_spec; i < next_spec_; ++i) {
      written_.push_back({schema.name(), &call_.operands[i]});
    }
  }
}

void RuleCall::add(const at::Tensor& tensor, std::size_t argument, std::string name) {
  if (!tensor.defined()) {
    return;
  }
  HS_CHECK_LT(
      next_spec_,
      call_.operands.size(),
      "dtensor.rules: ",
      this->name(),
      ": one spec for each defined tensor of the arguments"
  );
  const layout::TensorSpec& spec = call_.operands[next_spec_++];
  if (name.empty()) {
    return;  // only written: its shape and layout are compared, not read
  }
  HS_CHECK_EQ(
      spec.shape.size(),
      static_cast<std::size_t>(tensor.dim()),
      "dtensor.rules: ",
      this->name(),
      ": the spec of '",
      name,
      "' has global shape ",
      spec.shape,
      ", its tensor has local shape ",
      tensor.sizes()
  );
  operands_.push_back({std::move(name), argument, &tensor, &spec});
}

std::string_view RuleCall::name() const {
  return call_.op.schema().name();
}

int RuleCall::argument_index(std::string_view argument) const {
  const auto& arguments = call_.op.schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == argument) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

const c10::IValue* RuleCall::find(std::string_view argument) const {
  const int at = argument_index(argument);
  return at < 0 ? nullptr : &call_.arguments[static_cast<std::size_t>(at)];
}

bool RuleCall::has(std::string_view argument) const {
  const c10::IValue* value = find(argument);
  return value != nullptr && !value->isNone() &&
         (!value->isTensor() || value->toTensor().defined());
}

const c10::IValue& RuleCall::get(std::string_view argument) const {
  const c10::IValue* value = find(argument);
  HS_CHECK(value != nullptr, "dtensor.rules: ", name(), " has no argument '", argument, "'");
  return *value;
}

std::int64_t RuleCall::integer(std::string_view argument) const {
  const c10::IValue& value = get(argument);
  check_kind(*this, argument, value, value.isInt(), "an integer");
  return value.toInt();
}

std::int64_t RuleCall::integer(std::string_view argument, std::int64_t otherwise) const {
  return has(argument) ? integer(argument) : otherwise;
}

bool RuleCall::flag(std::string_view argument) const {
  const c10::IValue* value = find(argument);
  return value != nullptr && value->isBool() && value->toBool();
}

double RuleCall::number(std::string_view argument) const {
  const c10::IValue& value = get(argument);
  check_kind(*this, argument, value, value.isScalar(), "a number");
  return value.isComplexDouble() ? std::abs(value.toComplexDouble())
                                 : value.toScalar().to<double>();
}

std::string RuleCall::text(std::string_view argument) const {
  const c10::IValue& value = get(argument);
  check_kind(*this, argument, value, value.isString(), "a text");
  return value.toStringRef();
}

std::vector<std::int64_t> RuleCall::integers(std::string_view argument) const {
  const c10::IValue& value = get(argument);
  if (value.isNone()) {
    return {};
  }
  if (value.isInt()) {
    return {value.toInt()};
  }
  check_kind(*this, argument, value, value.isIntList(), "a list of integers");
  return value.toIntVector();
}

std::vector<double> RuleCall::numbers(std::string_view argument) const {
  const c10::IValue& value = get(argument);
  check_kind(*this, argument, value, value.isDoubleList(), "a list of numbers");
  return value.toDoubleVector();
}

int RuleCall::dim(std::string_view argument, int rank) const {
  return wrapped(integer(argument), rank, name());
}

std::vector<int> RuleCall::dims(std::string_view argument, int rank) const {
  std::vector<int> all;
  if (find(argument) != nullptr) {
    for (const std::int64_t dim : integers(argument)) {
      all.push_back(wrapped(dim, rank, name()));
    }
  }
  if (all.empty()) {
    all.resize(static_cast<std::size_t>(rank));
    std::iota(all.begin(), all.end(), 0);
  }
  return all;
}

int RuleCall::operand(std::string_view argument) const {
  const int at = argument_index(argument);
  for (std::size_t i = 0; at >= 0 && i < operands_.size(); ++i) {
    if (operands_[i].argument == static_cast<std::size_t>(at)) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

std::vector<int> RuleCall::operand_list(std::string_view argument) const {
  const int at = argument_index(argument);
  std::vector<int> list;
  if (at < 0) {
    return list;
  }
  int next = operand(argument);
  for (const c10::IValue& entry : call_.arguments[static_cast<std::size_t>(at)].toListRef()) {
    const bool is_defined = entry.isTensor() && entry.toTensor().defined();
    list.push_back(is_defined ? next++ : -1);
  }
  return list;
}

std::span<const std::int64_t> RuleCall::local_shape(int operand) const {
  const auto sizes = tensor(operand).sizes();
  return {sizes.data(), sizes.size()};
}

bool RuleCall::is_cut(int operand, int dim) const {
  for (const layout::Placement& placement : spec(operand).layout.placements) {
    if (placement == layout::Placement::shard(dim)) {
      return true;
    }
  }
  return false;
}

RuleCall::Sizes RuleCall::piece_sizes(int operand, int dim) const {
  Sizes sizes{shape(operand)[index(dim)], shape(operand)[index(dim)]};
  for (const int axis : spec(operand).layout.cut_axes(dim)) {
    const int num_pieces = mesh_.axes()[index(axis)].size;
    sizes.least = sizes.least / num_pieces;
    sizes.most = (sizes.most + num_pieces - 1) / num_pieces;
  }
  return sizes;
}

}  // namespace hypershard::dtensor
