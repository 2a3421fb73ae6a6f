// The one form in which operator layout rules are written: how the dimensions of a call's outputs
// come from the dimensions of its operands. Layouts, global shapes and refusals follow from it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "hypershard/layout/placement.h"

namespace hypershard::dtensor {

/// Why a call has no meaning on its operands' layouts, and what to do about it.
struct Refusal {
  std::string what;  ///< operator, operands with shapes, dimensions, mesh axis and the fault
  std::string fix;   ///< what to change
  bool operator==(const Refusal&) const = default;
};

/// One dimension of an operand or output.
///
/// Dimensions with one label run over one index: where it is cut, all of them are. A dimension may
/// run over `label x block`, the label outermost (what a merge or split of dimensions leaves);
/// it can be cut only into pieces of whole blocks.
struct Dim {
  static constexpr int kWhole = -1;  ///< the operator needs every entry: may not be cut

  int label = kWhole;
  std::int64_t block = 1;
  std::int64_t size = -1;  ///< global size; for outputs' dimensions without a label only

  static Dim whole(std::int64_t size = -1) { return {.label = kWhole, .block = 1, .size = size}; }
  static Dim of(int label, std::int64_t block = 1) { return {.label = label, .block = block}; }
};
using Dims = std::vector<Dim>;

/// What becomes of a cut index in an output that does not have it.
enum class Reduction : std::uint8_t {
  kRefused,  ///< the operator needs it whole
  kSum,      ///< Partial(sum)
  kMean,     ///< Partial(avg); pieces must be of equal size
  kMax,      ///< Partial(max); pieces must not be empty
  kMin,      ///< Partial(min); pieces must not be empty
  kInside,   ///< Replicate: the operator reduces over the axis itself
};

/// What of an operand the operator uses.
enum class Role : std::uint8_t {
  kValue,    ///< values
  kShape,    ///< its shape only (`zeros_like`): Partial counts as Replicate
  kIgnored,  ///< neither (a dtype's example): any layout will do
};

/// Reductions under which an operator's terms may pass Partial operands on.
struct Passes {
  bool sum = true;  ///< sum and avg: linear
  bool max = false;
  bool min = false;
};

/// One operand of a call.
struct OperandMap {
  Dims dims;
  Role role = Role::kValue;
};

/// One result of a call.
struct OutputMap {
  Dims dims;
  bool is_defined = true;      ///< an undefined result of the operator has an empty spec
  std::vector<int> from = {};  ///< operands it depends on; empty: all
};

/// How one call's dimensions correspond, and in which operands the operator is linear.
struct DimMap {
  std::vector<OperandMap> operands;  ///< in the order of `RuleCall`'s operands
  std::vector<OutputMap> outputs;
  std::vector<Reduction> reductions;  ///< one for each label
  /// The result as a sum of products of operands, by index: {{0}, {1, 2}} is `a + b * c`. Operands
  /// in no term are used non-linearly. Empty: no operand may be Partial.
  std::vector<std::vector<int>> terms;
  Passes passes;
  bool takes_empty = true;  ///< false: the kernels fail on empty pieces, so they are refused
  bool is_random = false;
  std::optional<Refusal> refusal;  ///< set by a rule for calls that have none

  int new_label(Reduction reduction = Reduction::kRefused) {
    reductions.push_back(reduction);
    return static_cast<int>(reductions.size()) - 1;
  }
};

/// A rule's answer for a call that it cannot describe.
DimMap refuse(std::string what, std::string fix);

}  // namespace hypershard::dtensor
