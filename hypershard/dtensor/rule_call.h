// What a rule sees of a call: arguments by name, operands with global and local shapes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hypershard/dtensor/op_rules.h"

namespace c10 {
struct Argument;
}

namespace hypershard::dtensor {

/// One call as rules read it: tensors that the operator only writes (`out`) are left out, so that
/// a rule serves the functional, in-place and out variants alike.
///
/// Refers to the OpCall and the mesh. Errors: InvalidArgument if `operands` does not hold one spec
/// for each defined tensor of the arguments, or a spec's rank is not its tensor's.
class RuleCall {
 public:
  RuleCall(const OpCall& call, const layout::DeviceMesh& mesh);

  std::string_view name() const;  ///< without overload, e.g. `aten::mm`
  const c10::OperatorHandle& op() const { return call_.op; }
  const layout::DeviceMesh& mesh() const { return mesh_; }

  /// Tells whether there is an argument of that name that is neither None nor undefined.
  bool has(std::string_view argument) const;
  /// Returns the argument or null.
  const c10::IValue* find(std::string_view argument) const;

  /// Values of arguments. Errors: InvalidArgument naming the operator and the argument if there is
  /// none of that name and kind.
  std::int64_t integer(std::string_view argument) const;
  std::int64_t integer(std::string_view argument, std::int64_t otherwise) const;
  bool flag(std::string_view argument) const;
  double number(std::string_view argument) const;
  std::vector<double> numbers(std::string_view argument) const;
  std::string text(std::string_view argument) const;
  /// A single integer counts as a list of one; None as an empty list.
  std::vector<std::int64_t> integers(std::string_view argument) const;
  /// Returns the dimension that an argument names, counted from the front.
  int dim(std::string_view argument, int rank) const;
  /// Dimensions from the front; None and an empty list mean all.
  std::vector<int> dims(std::string_view argument, int rank) const;

  int num_operands() const { return static_cast<int>(operands_.size()); }
  /// Returns the operand that an argument holds, or -1 if it is undefined, None or no argument.
  int operand(std::string_view argument) const;
  /// Returns the operands in a list of tensors; -1 stands for undefined ones.
  std::vector<int> operand_list(std::string_view argument) const;
  const std::string& operand_name(int operand) const { return operands_[index(operand)].name; }
  const layout::TensorSpec& spec(int operand) const { return *operands_[index(operand)].spec; }
  const std::vector<std::int64_t>& shape(int operand) const { return spec(operand).shape; }
  int rank(int operand) const { return static_cast<int>(shape(operand).size()); }
  std::span<const std::int64_t> local_shape(int operand) const;
  const at::Tensor& tensor(int operand) const { return *operands_[index(operand)].tensor; }
  /// Tells whether some axis of the mesh cuts the operand along `dim`.
  bool is_cut(int operand, int dim) const;
  /// Bounds the local sizes of a dimension over all ranks: what a rule may rest on, since every
  /// rank must come to the same verdict.
  struct Sizes {
    std::int64_t least = 0;
    std::int64_t most = 0;
  };
  /// Returns the bounds for dimension `dim` of an operand.
  Sizes piece_sizes(int operand, int dim) const;

  /// Specs of tensors that the call writes, in schema order, with their arguments' names.
  struct Written {
    std::string name;
    const layout::TensorSpec* spec = nullptr;
  };
  const std::vector<Written>& written() const { return written_; }

 private:
  struct Operand {
    std::string name;
    std::size_t argument = 0;
    const at::Tensor* tensor = nullptr;
    const layout::TensorSpec* spec = nullptr;
  };
  static std::size_t index(int operand) { return static_cast<std::size_t>(operand); }
  const c10::IValue& get(std::string_view argument) const;
  void add(const at::Tensor& tensor, std::size_t argument, std::string name);
  void add_argument(const c10::Argument& schema, std::size_t argument);
  int argument_index(std::string_view argument) const;

  const OpCall& call_;
  const layout::DeviceMesh& mesh_;
  std::size_t next_spec_ = 0;
  std::vector<Operand> operands_;
  std::vector<Written> written_;
};

}  // namespace hypershard::dtensor
