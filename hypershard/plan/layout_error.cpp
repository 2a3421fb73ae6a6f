// See layout_error.h.
#include "hypershard/plan/layout_error.h"

#include <utility>

#include "hypershard/plan/internal/module_name.h"

namespace hypershard::plan {
namespace {

ErrorText error_text(const LayoutFault& fault) {
  ErrorText text(to_text(fault));
  text.hint = fault.fix;
  return text;
}

}  // namespace

std::string to_text(const LayoutFault& fault) {
  std::string text = "plan: " + fault.subject;
  if (!internal::names_module(fault.subject, fault.module)) {
    text += " in " + fault.module;
  }
  text += ": " + fault.what;
  for (std::size_t i = 0; i < fault.operands.size(); ++i) {
    text += concat_text(i == 0 ? " (" : "; ", "tensor ", i, ": ", fault.operands[i]);
  }
  return fault.operands.empty() ? text : text + ")";
}

std::string operand_text(
    const layout::TensorSpec& spec,
    const std::vector<std::int64_t>& local,
    const layout::DeviceMesh& mesh
) {
  return concat_text(
      "{", layout::to_text(spec.layout, mesh), "} global ", spec.shape, " local ", local
  );
}

LayoutError::LayoutError(LayoutFault fault)
    : InvalidArgument(error_text(fault)), fault_(std::move(fault)) {}

}  // namespace hypershard::plan
