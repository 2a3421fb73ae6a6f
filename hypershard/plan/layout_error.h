// The one error by which plans and their validation refuse: where, which operator or boundary, on
// what, why, and what to do. And the one by which ranks learn that another could not go on.
#pragma once

#include <string>
#include <vector>

#include "hypershard/core/error.h"
#include "hypershard/layout/mesh.h"
#include "hypershard/layout/tensor_spec.h"

namespace hypershard::plan {

/// What is wrong with a layout, in fields.
struct LayoutFault {
  std::string module;   ///< path of the module that ran, or `(root)`
  std::string subject;  ///< `aten::add.Tensor`, `output 0 of blocks.3.mlp`, `parameter x.weight`
  std::vector<std::string> operands;  ///< one text a tensor, see operand_text
  std::string what;
  std::string fix;
};
/// Writes the fault in one line, without the fix.
std::string to_text(const LayoutFault& fault);

/// Describes a tensor: `{tp: Shard(0)} global [8, 6] local [4, 6]`.
std::string operand_text(
    const layout::TensorSpec& spec,
    const std::vector<std::int64_t>& local,
    const layout::DeviceMesh& mesh
);

/// A plan, or a model under a plan, that would compute something wrong. The text names everything
/// the fault does, and the rank.
class LayoutError : public InvalidArgument {
 public:
  explicit LayoutError(LayoutFault fault);
  const LayoutFault& fault() const { return fault_; }

 private:
  LayoutFault fault_;
};

/// Another rank left a validated program by an exception that has nothing to do with layouts. The
/// text names the rank and holds what it threw, with that error's code.
class PeerFailure : public Error {
 public:
  PeerFailure(ErrorCode code, const ErrorText& text) : Error(code, text) {}
};

}  // namespace hypershard::plan
