// Operator layout rules: which layouts an operator's outputs have, given its operands'.
// Rules never move data: they accept layouts as they come, or refuse with the reason.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include "hypershard/dtensor/dim_map.h"
#include "hypershard/layout/tensor_spec.h"

namespace c10 {
class OperatorHandle;
struct IValue;
}  // namespace c10

namespace hypershard::dtensor {

/// One call of an operator on this rank, as a boxed kernel sees it. Refers to the caller's data.
struct OpCall {
  const c10::OperatorHandle& op;
  /// All of the schema's arguments; tensors are local ones, real or meta. Sizes among them
  /// (`view`, `expand`, `zeros`) are local sizes.
  c10::ArrayRef<c10::IValue> arguments;
  /// One for each defined tensor in the arguments, in schema order, lists flattened.
  std::span<const layout::TensorSpec> operands;
};

/// What a rule says of a call.
struct Verdict {
  /// One for each tensor that the operator returns, lists flattened; an undefined result counts,
  /// with an empty layout. Empty if refused.
  std::vector<layout::TensorSpec> outputs;
  std::optional<Refusal> refusal;
  /// The operator draws random numbers: ranks whose operands are Replicate on an axis must draw the
  /// same ones there, ranks that hold different pieces should draw different ones.
  bool is_random = false;

  bool operator==(const Verdict&) const = default;
};

/// Derives the outputs' global shapes and layouts, or says why there are none.
///
/// For each mesh axis: a cut dimension stays cut in every output that has it, becomes Partial where
/// the operator reduces it, and must be cut in every operand that has it. A Partial operand passes
/// through operators that are linear in it, beside operands that are Replicate on that axis.
/// In-place and out variants follow the functional rule; the tensor they write must keep its
/// layout. On an axis of size 1 nothing is refused.
/// Losses with a mean give Partial(avg) for equal pieces; that is the global mean if no target has
/// `ignore_index`.
///
/// Errors: InvalidArgument if `operands` do not fit the arguments or the mesh.
/// Threads: any.
Verdict propagate(const OpCall& call, const layout::DeviceMesh& mesh);

class RuleCall;
/// A rule: states for a call how dimensions correspond (`rule_call.h`, `dim_map.h`).
using OpRule = std::function<DimMap(const RuleCall& call)>;

/// Adds the rule of an operator, e.g. `my::op`; it serves all overloads, `my::op_` and out
/// variants. Errors: InvalidArgument if the operator has a rule. Threads: any; calls that run
/// meanwhile see the registry before or after.
void register_op_rule(std::string_view qualified_name, OpRule rule);

/// Tells whether a name without overload, e.g. `aten::add_`, has a rule of its own or through its
/// functional form.
bool has_rule(std::string_view qualified_name);

/// One operator that has a rule, for documentation.
struct RuledOperator {
  std::string name;        ///< without overload, e.g. `aten::mm`
  std::string family;      ///< e.g. `contractions`; `user` for registered ones
  bool takes_cuts = true;  ///< false: refused but where all operands are Replicate, or has none
};
/// Lists operators with a rule by family, then name.
std::vector<RuledOperator> ruled_operators();

}  // namespace hypershard::dtensor
