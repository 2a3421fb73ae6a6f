// Why: see dtype_text.h; one switch instead of one per back end.
// Types without a name of their own here keep c10's.
#include "hypershard/comm/internal/dtype_text.h"

namespace hypershard::comm::internal {

std::string dtype_text(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kDouble:
      return "float64";
    case c10::kFloat:
      return "float32";
    case c10::kBFloat16:
      return "bfloat16";
    case c10::kHalf:
      return "float16";
    case c10::kLong:
      return "int64";
    case c10::kInt:
      return "int32";
    case c10::kShort:
      return "int16";
    case c10::kChar:
      return "int8";
    case c10::kByte:
      return "uint8";
    case c10::kBool:
      return "bool";
    default:
      return c10::toString(dtype);
  }
}

}  // namespace hypershard::comm::internal
